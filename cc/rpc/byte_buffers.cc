#include "cc/rpc/byte_buffers.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <cstdlib>

namespace tfswitch {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

void ListPieces(grpc::ByteBuffer* buffer,
                std::vector<absl::string_view>* pieces) {
  pieces->clear();
  if (buffer->Length() == 0) return;
  grpc::ProtoBufferReader reader(buffer);
  const void* data;
  int size;
  while (reader.Next(&data, &size)) {
    pieces->emplace_back(static_cast<const char*>(data), size);
  }
}

OutgoingMessage::OutgoingMessage(size_t size, size_t aligned_offset)
    : size_(size) {
  // The padding puts `aligned_offset` on a boundary.
  const size_t padding =
      (kAlignment - aligned_offset % kAlignment) % kAlignment;
  const size_t rounded =
      (padding + size + kAlignment - 1) / kAlignment * kAlignment;
  block_ = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  data_ = block_ == nullptr ? nullptr : static_cast<char*>(block_) + padding;
}

OutgoingMessage::~OutgoingMessage() { std::free(block_); }

grpc::ByteBuffer OutgoingMessage::ToByteBuffer() && {
  grpc::Slice slice(data_, size_, &std::free, block_);
  block_ = nullptr;
  data_ = nullptr;
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer ToByteBuffer(absl::string_view bytes) {
  grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace tfswitch
