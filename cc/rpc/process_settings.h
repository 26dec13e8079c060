// Settings of this folder for the whole process.

#ifndef TFSWITCH_CC_RPC_PROCESS_SETTINGS_H_
#define TFSWITCH_CC_RPC_PROCESS_SETTINGS_H_

namespace tfswitch {

// Called before the first server or client; does nothing after the first time.
//
//   - Tunes malloc; see base/malloc_tuning.h for the switch to leave it alone.
//   - Turns off Abseil's deadlock detection, which distributions leave on in
//     their builds: it takes one global lock at each of gRPC's many lock
//     operations, 5 us per small pull on one thread and more on many. This is
//     the Abseil that gRPC is linked to, not the one inside TensorFlow.
//   - TakeLinesOfGrpc().
//
// Thread-safe.
void PrepareProcess();

// Sends gRPC's lines to the log writer, which delays no call. Thread-safe.
void TakeLinesOfGrpc();

// For programs that only serve; in others this would change settings of the
// host. Call it before there are threads and before any use of gRPC.
//
// gRPC 1.51 reads into pieces of 64 KiB, even if a channel asks for another
// size, as long as its experiment `tcp_read_chunks` is on, which is the
// default. This sets GRPC_EXPERIMENTS to turn it off, unless the variable is
// set already.
//
// Each connection is an open file, and shells often allow 1024 of them. This
// raises the soft limit to the hard one.
//
// SIGPIPE is ignored: a pipe whose reader has gone is an error of the write,
// not the end of the program.
void PrepareServerProgram();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_PROCESS_SETTINGS_H_
