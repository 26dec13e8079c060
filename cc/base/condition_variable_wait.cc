// The definition that libstdc++ had before g++ 12, in which the symbol has a
// new version. With it here the libraries of a wheel do not need that version,
// and run on systems with the library of g++ 11.

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
