// Contains the definition of std::condition_variable::wait() that libstdc++ had
// before g++ 12. In g++ 12 its symbol got a new version. A wheel's libraries
// find the old function here. So they do not need the new version, and load on
// systems with the libstdc++ of g++ 11.

#include <pthread.h>

#include <condition_variable>
#include <mutex>

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 12
namespace std {

// NOLINTNEXTLINE(cert-dcl58-cpp)
void condition_variable::wait(unique_lock<mutex>& lock) {
  pthread_cond_wait(native_handle(), lock.mutex()->native_handle());
}

}  // namespace std
#endif
