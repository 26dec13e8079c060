// The messages of Pull, Push and Assign, and of PullMany and PushMany, read and
// written without protobuf.
//
// A step moves megabytes of keys and floats, and protobuf would copy each of
// them into a message and out again. Here arrays go from the network's memory
// to the table, and from the table to the network's memory, in one copy or
// none. The bytes are those of the proto messages, so a plain stub of any
// language can be at the other end:
//
//   | 0x0a len table | 0x12 len keys (8 B each) | 0x1a len floats (4 B each)
//   |..
//
// A message of many is these one after the other, each behind 0x0a and its
// length.
//
// The readers accept exactly the bytes that protobuf's own parser accepts:
// fields in any order, packed or not, in several chunks, among unknown fields.
// Malformed bytes give InvalidArgument naming the message and the offset.
//
// Knows nothing of gRPC: a message comes as the pieces it was received in.

#ifndef TFSWITCH_CC_WIRE_CODEC_H_
#define TFSWITCH_CC_WIRE_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Of client and server; both must speak the same.
inline constexpr uint32_t kProtocolVersion = 1;

// The bytes of one message, in order. A piece may end anywhere.
using MessagePieces = absl::Span<const absl::string_view>;

// Growable memory on a 64-byte boundary; its contents are up to the user.
//
// Not thread-safe.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  ~AlignedBuffer() { Free(); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  char* data() const { return data_; }
  size_t capacity() const { return capacity_; }

  // Makes room for `bytes`, keeping the first `used` bytes. Returns false, and
  // changes nothing, if there is no memory.
  bool Reserve(size_t bytes, size_t used);
  void Free();

 private:
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

// Where arrays go that do not lie whole and aligned in one piece. One per
// thread, reused from message to message.
struct DecodeScratch {
  AlignedBuffer keys;
  AlignedBuffer values;
  AlignedBuffer slots;
  AlignedBuffer counts;
  AlignedBuffer shows;
  AlignedBuffer clicks;

  size_t capacity() const;
  // Gives memory back that an unusually large message has left behind: all of
  // it, if it is more than 64 MiB.
  void Trim();
};

// One for each part of a message of many, whose parts are all read before the
// first is used.
//
// Not thread-safe.
class PartScratch {
 public:
  // The same object until Trim().
  DecodeScratch& at(size_t part);
  // The same for all parts together, and for those of an unusual number of
  // parts. Costs nothing if at() was not called since the last time.
  void Trim();

 private:
  std::deque<DecodeScratch> parts_;
  bool is_used_ = false;
};

// Spans that are read point into the pieces or the scratch, and are valid as
// long as both are untouched.
//
// InvalidArgument for malformed bytes, ResourceExhausted if there is no memory.
absl::Status ReadPullRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PullRequest* request);
absl::Status ReadPushRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PushRequest* request);
absl::Status ReadAssignRequest(MessagePieces pieces, DecodeScratch* scratch,
                               AssignRequest* request);

// A message of more parts than this is refused: each costs memory, also if it
// has no bytes, and pushes must not leave the window of WriteLedger behind.
inline constexpr size_t kMaxPartsPerMessage = 4096;

// Messages of many. The errors also say which of the requests it is.
absl::Status ReadPullManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PullRequest>* requests);
absl::Status ReadPushManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PushRequest>* requests);
// The i-th response as ReadPullResponse() does, for targets[i]; those beyond
// are only counted. *num_floats has one element for each response.
absl::Status ReadPullManyResponse(MessagePieces pieces,
                                  absl::Span<const RowTarget> targets,
                                  std::vector<uint64_t>* num_floats);
absl::Status ReadPushManyResponse(MessagePieces pieces,
                                  std::vector<WriteResult>* results);

// Copies the response's floats to where they go. *num_floats is how many the
// message has; those beyond target.num_floats() are dropped.
absl::Status ReadPullResponse(MessagePieces pieces, const RowTarget& target,
                              uint64_t* num_floats);
// A PushResponse or an AssignResponse, which `name` says in errors.
absl::Status ReadWriteResponse(const char* name, MessagePieces pieces,
                               WriteResult* result);

// The exact length of a message, and its bytes: the same as protobuf's.
//
// REQUIRES: `to` has room for that length.
uint64_t PullRequestBytes(const PullRequest& request);
void WritePullRequest(const PullRequest& request, char* to);
uint64_t PushRequestBytes(const PushRequest& request);
void WritePushRequest(const PushRequest& request, char* to);
// The same in parts, for gradients that are sent from where they lie: the bytes
// before them and the bytes after.
uint64_t PushRequestHeadBytes(const PushRequest& request);
void WritePushRequestHead(const PushRequest& request, char* to);
std::string PushRequestTail(const PushRequest& request);
uint64_t AssignRequestBytes(const AssignRequest& request);
void WriteAssignRequest(const AssignRequest& request, char* to);

// Writes the header before the floats of a PullResponse. A response of no
// floats has no bytes at all. Returns how many bytes were written.
//
// REQUIRES: `to` has room for kMaxPullResponseHeader bytes.
inline constexpr size_t kMaxPullResponseHeader = 11;
size_t WritePullResponseHeader(uint64_t num_floats, char* to);

// Writes the header before each request or response in a message of many.
// Returns how many bytes were written.
//
// REQUIRES: `to` has room for kMaxPartHeader bytes.
inline constexpr size_t kMaxPartHeader = 11;
size_t WritePartHeader(uint64_t part_bytes, char* to);

// The length of a part with its header.
uint64_t PartBytes(uint64_t part_bytes);
// The length of a PullResponse.
uint64_t PullResponseBytes(uint64_t num_floats);

// A PushResponse or an AssignResponse.
std::string EncodeWriteResponse(const WriteResult& result);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_CODEC_H_
