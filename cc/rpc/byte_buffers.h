// Connects grpc::ByteBuffer to codec.h.

#ifndef TFSWITCH_CC_RPC_BYTE_BUFFERS_H_
#define TFSWITCH_CC_RPC_BYTE_BUFFERS_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfswitch {

// Lists the pieces of a received message. The pieces are valid until `buffer`
// changes: the list holds no reference to it.
void ListPieces(grpc::ByteBuffer* buffer,
                std::vector<absl::string_view>* pieces);

// An outgoing message whose bytes the caller writes in place. data() is null if
// there is no memory.
//
//   OutgoingMessage message(size);
//   if (message.data() != nullptr) WriteX(args, message.data());
//   buffer = std::move(message).ToByteBuffer();
//
// ToByteBuffer() hands the bytes to gRPC, which may still send them after the
// call has ended: if a call reaches its deadline while the socket is full, the
// write continues until the connection ends. So arrays that the caller may
// release after the call must be copied.
class OutgoingMessage {
 public:
  // The byte at `aligned_offset` will lie on a 64-byte boundary.
  explicit OutgoingMessage(size_t size, size_t aligned_offset = 0);
  ~OutgoingMessage();
  OutgoingMessage(const OutgoingMessage&) = delete;
  OutgoingMessage& operator=(const OutgoingMessage&) = delete;

  char* data() const { return data_; }

  grpc::Slice ToSlice() &&;
  grpc::ByteBuffer ToByteBuffer() &&;

 private:
  void* block_;
  char* data_;
  const size_t size_;
};

grpc::ByteBuffer ToByteBuffer(absl::string_view bytes);

// Sends bytes without copying them. gRPC keeps `owner` until it no longer needs
// them.
grpc::Slice ShareBytes(const void* data, size_t size,
                       std::shared_ptr<const void> owner);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_BYTE_BUFFERS_H_
