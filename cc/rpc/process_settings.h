// Settings of the whole process that the rpc code needs.

#ifndef TFSWITCH_CC_RPC_PROCESS_SETTINGS_H_
#define TFSWITCH_CC_RPC_PROCESS_SETTINGS_H_

namespace tfswitch {

// Call it before the first server or client. Further calls do nothing.
//
// - Tunes malloc; see base/malloc_tuning.h, also for how to prevent it.
// - Turns off Abseil's deadlock detection, which is on in the builds of
//   distributions. It takes one global lock at each of gRPC's many lock
//   operations, which costs 5 us per small pull on one thread and more on many
//   threads. This is the Abseil that gRPC is linked to, not the one inside
//   TensorFlow.
// - TakeLinesOfGrpc().
//
// Thread-safe.
void PrepareProcess();

// Makes gRPC log through the log writer, which delays no call. Thread-safe.
void TakeLinesOfGrpc();

// Only for programs whose only task is to serve; elsewhere it would change
// settings of the host program. Call it before there are threads and before any
// use of gRPC.
//
// By default (experiment `tcp_read_chunks`), gRPC 1.51 reads into pieces of 64
// KiB, even if a channel asks for another size. This turns the experiment off
// by setting GRPC_EXPERIMENTS, unless the variable is set already.
//
// Each connection is an open file, and shells often allow only 1024. This
// raises the soft limit to the hard limit.
//
// Ignores SIGPIPE, so that a write to a closed pipe fails and does not end the
// program.
void PrepareServerProgram();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_PROCESS_SETTINGS_H_
