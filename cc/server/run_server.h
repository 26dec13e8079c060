// Runs tfswitch-server, from its flags to its exit code.

#ifndef TFSWITCH_CC_SERVER_RUN_SERVER_H_
#define TFSWITCH_CC_SERVER_RUN_SERVER_H_

#include <string>
#include <vector>

namespace tfswitch {

// Serves until SIGTERM or SIGINT, then stops with the grace period. Prints one
// line to standard output when it is ready:
//
//   tfswitch-server 0.1.0: shard 0 of 2 serving on 127.0.0.1:7077
//
// With --repair it repairs the data folder instead, and prints the result.
//
// Returns the exit code: 0 after a graceful stop, 1 if the server could not
// listen, 2 for a bad flag or value. An error is one line on standard error. A
// second signal during the grace period ends the process at once.
//
// REQUIRES: no other thread runs yet, because signals are blocked for all
// threads that start later.
int RunServer(const std::vector<std::string>& arguments);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVER_RUN_SERVER_H_
