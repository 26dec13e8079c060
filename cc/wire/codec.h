// Reads and writes the messages of Pull, Push and Assign, and of PullMany and
// PushMany, without protobuf.
//
// A step moves megabytes of keys and floats, and protobuf would copy each of
// them into a message and out of it. This code copies arrays between the
// network's memory and the table once, or not at all. The bytes are those of
// the proto messages, so the other side may use a gRPC stub in any language:
//
//   | 0x0a len table | 0x12 len keys (8 B each) | 0x1a len floats (4 B each)
//   |..
//
// Rows and gradients of a 16-bit type are bytes in a field of their own. They
// are rounded where they are written, and become floats where they are read.
// Gradients are rounded at random, so that steps smaller than the last bit have
// their effect on average; see half_floats.h. The noise depends on the push's
// sequence and the gradient's place, so a repeated push has the same bytes.
//
// A PullMany or PushMany message contains several of these messages. A byte
// 0x0a and the length precede each of them.
//
// The readers accept exactly the bytes that protobuf's own parser accepts:
// fields in any order, packed or not, in several chunks, and between unknown
// fields. Malformed bytes give InvalidArgument naming the message and the
// offset.
//
// This code does not depend on gRPC: a message is a list of the pieces that
// were received.

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
#include "cc/base/half_floats.h"
#include "cc/base/hash.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// The version of the protocol. Client and server must have the same one.
inline constexpr uint32_t kProtocolVersion = 1;

// The bytes of one message, in order. A piece may end anywhere.
using MessagePieces = absl::Span<const absl::string_view>;

// Growable memory on a 64-byte boundary. Its contents are not initialised.
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

  // Makes room for `bytes` in all, and keeps the first `used` bytes. Returns
  // false, and changes nothing, if there is no memory.
  bool Reserve(size_t bytes, size_t used);
  void Free();

 private:
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

// Memory for copies of arrays that are not whole and aligned in one piece. Each
// thread has one such object and reuses it for later messages.
struct DecodeScratch {
  AlignedBuffer keys;
  AlignedBuffer values;
  AlignedBuffer slots;
  AlignedBuffer counts;
  AlignedBuffer shows;
  AlignedBuffer clicks;

  size_t capacity() const;
  // Frees all memory if it is more than 64 MiB, as after an unusually large
  // message.
  void Trim();
};

// One DecodeScratch for each part of a PullMany or PushMany message. They
// cannot share one, because all parts are read before the first is used.
//
// Not thread-safe.
class PartScratch {
 public:
  // Returns the same object until Trim().
  DecodeScratch& at(size_t part);
  // Frees memory if all parts together have more than 64 MiB, or there are
  // unusually many parts. Does nothing if at() was not called since the last
  // Trim().
  void Trim();

 private:
  std::deque<DecodeScratch> parts_;
  bool is_used_ = false;
};

// These functions read requests. Spans in the results point into the pieces or
// the scratch, and are valid until one of the two changes.
//
// InvalidArgument for malformed bytes, ResourceExhausted if there is no memory.
absl::Status ReadPullRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PullRequest* request);
absl::Status ReadPushRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PushRequest* request);
absl::Status ReadAssignRequest(MessagePieces pieces, DecodeScratch* scratch,
                               AssignRequest* request);

// The most parts of a PullMany or PushMany message. It is limited because each
// part costs memory, even if it has no bytes, and because the pushes of a
// message must not be more than WriteLedger can remember.
inline constexpr size_t kMaxPartsPerMessage = 4096;

// These functions read PullMany and PushMany messages. If a part is malformed,
// the error names its index.
absl::Status ReadPullManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PullRequest>* requests);
absl::Status ReadPushManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PushRequest>* requests);
// Reads the i-th response to targets[i], as ReadPullResponse() does. If there
// are more responses than targets, the others are only counted. *num_floats and
// *versions get one element for each response.
absl::Status ReadPullManyResponse(MessagePieces pieces,
                                  absl::Span<const RowTarget> targets,
                                  std::vector<uint64_t>* num_floats,
                                  std::vector<RowsVersion>* versions = nullptr);
absl::Status ReadPushManyResponse(MessagePieces pieces,
                                  std::vector<WriteResult>* results);

// Copies the response's floats to `target`, at most target.num_floats() of
// them. *num_floats receives how many floats the response has.
absl::Status ReadPullResponse(MessagePieces pieces, const RowTarget& target,
                              uint64_t* num_floats);
// Reads a PushResponse or an AssignResponse. Errors call it `name`.
absl::Status ReadWriteResponse(const char* name, MessagePieces pieces,
                               WriteResult* result);

// These functions return the exact length of a message, and write its bytes,
// which are the same as protobuf's.
//
// REQUIRES: `to` has room for that length.
uint64_t PullRequestBytes(const PullRequest& request);
void WritePullRequest(const PullRequest& request, char* to);
uint64_t PushRequestBytes(const PushRequest& request);
void WritePushRequest(const PushRequest& request, char* to);
// These functions write a PushRequest without its gradients: the bytes before
// the gradients, and the bytes after them. The gradients are sent without a
// copy. REQUIRES: request.wire_dtype is kFloat32.
uint64_t PushRequestHeadBytes(const PushRequest& request);
void WritePushRequestHead(const PushRequest& request, char* to);
std::string PushRequestTail(const PushRequest& request);
uint64_t AssignRequestBytes(const AssignRequest& request);
void WriteAssignRequest(const AssignRequest& request, char* to);

// Writes the header that precedes the floats of a PullResponse. A response
// without floats has no bytes at all. Returns how many bytes were written.
//
// REQUIRES: `to` has room for kMaxPullResponseHeader bytes.
inline constexpr size_t kMaxPullResponseHeader = 11;
size_t WritePullResponseHeader(uint64_t num_floats, char* to,
                               FloatType type = FloatType::kFloat32);
// Writes the version that follows the rows of a PullResponse.
//
// REQUIRES: `to` has room for kRowsVersionBytes.
inline constexpr size_t kRowsVersionBytes = 18;
void WriteRowsVersion(const RowsVersion& version, char* to);
// Writes rows as numbers of a 16-bit type, rounded to nearest. Keeps the marks
// of missing rows.
//
// REQUIRES: `to` has room for WireBytes(rows.size(), type).
void WriteHalfRows(absl::Span<const float> rows, FloatType type, char* to);
// Rounds rows as a message with this type does.
void RoundRows(FloatType type, absl::Span<float> rows);

// Writes the header that precedes each part of a PullMany or PushMany message,
// or of its response. Returns how many bytes were written.
//
// REQUIRES: `to` has room for kMaxPartHeader bytes.
inline constexpr size_t kMaxPartHeader = 11;
size_t WritePartHeader(uint64_t part_bytes, char* to);

// The length of a part with its header.
uint64_t PartBytes(uint64_t part_bytes);
// The length of a PullResponse.
uint64_t PullResponseBytes(uint64_t num_floats,
                           FloatType type = FloatType::kFloat32);
// The length of numbers in a message.
inline uint64_t WireBytes(uint64_t num_floats, FloatType type) {
  return num_floats * (type == FloatType::kFloat32 ? 4 : 2);
}

// Writes a PushResponse or an AssignResponse.
std::string EncodeWriteResponse(const WriteResult& result);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_CODEC_H_
