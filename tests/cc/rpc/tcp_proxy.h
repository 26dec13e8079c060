// A TCP proxy on loopback that a test can make behave badly.

#ifndef TFSWITCH_TESTS_CC_RPC_TCP_PROXY_H_
#define TFSWITCH_TESTS_CC_RPC_TCP_PROXY_H_

#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Forwards each connection to the target, both ways, on one thread of its own.
//
// Thread-safe.
class TcpProxy {
 public:
  // `target` is "127.0.0.1:port".
  explicit TcpProxy(const std::string& target);
  ~TcpProxy();
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  const std::string& address() const { return address_; }

  // New connections are forwarded to `target`.
  void SetTarget(const std::string& target);

  // While on, the answers of the target, which speaks HTTP/2, pile up here
  // instead of reaching clients.
  void HoldAnswers(bool hold);

  // While on, nothing is read from either side, as if the network were gone.
  void Freeze(bool freeze);

  // Closes all connections; new ones are accepted as before. Bytes held are
  // lost.
  void CutConnections();

  // How many connections were accepted.
  int num_accepted();

 private:
  struct Pair {
    int client = -1;
    int target = -1;
    std::string arrived;  // From the target: the beginning of a frame.
    std::string held;     // Answers not yet sent to the client.
  };

  void Run();
  void Wake();
  void Accept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False if the connection has ended.
  bool Forward(Pair* pair) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Close(const Pair& pair);

  // Constant after construction.
  std::string address_;
  int listener_ = -1;
  int wake_pipe_[2] = {-1, -1};
  std::thread thread_;

  Mutex mutex_;
  int target_port_ ABSL_GUARDED_BY(mutex_) = 0;
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  bool freeze_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  int num_accepted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Pair> pairs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_RPC_TCP_PROXY_H_
