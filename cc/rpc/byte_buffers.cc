#include "cc/rpc/byte_buffers.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <cstdlib>
#include <utility>

#include "cc/base/racy_memory.h"

#if TFSWITCH_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace tfswitch {
namespace {

constexpr size_t kAlignment = 64;

// Tells ThreadSanitizer that gRPC hands a slice from one thread to another.
// gRPC is built without ThreadSanitizer, which therefore does not see this.
void AnnotateHandOver(void* object) {
#if TFSWITCH_THREAD_SANITIZER
  __tsan_release(object);
#else
  (void)object;
#endif
}
void AnnotateTakeOver(void* object) {
#if TFSWITCH_THREAD_SANITIZER
  __tsan_acquire(object);
#else
  (void)object;
#endif
}

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

grpc::Slice OutgoingMessage::ToSlice() && {
  grpc::Slice slice(data_, size_, &std::free, block_);
  block_ = nullptr;
  data_ = nullptr;
  return slice;
}

grpc::ByteBuffer OutgoingMessage::ToByteBuffer() && {
  const grpc::Slice slice = std::move(*this).ToSlice();
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer ToByteBuffer(absl::string_view bytes) {
  grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::Slice ShareBytes(const void* data, size_t size,
                       std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  auto* const held = new Owner(std::move(owner));
  AnnotateHandOver(held);
  // The cast is safe, because gRPC only reads bytes that it sends.
  return grpc::Slice(
      const_cast<void*>(data), size,
      [](void* handed_over) {
        AnnotateTakeOver(handed_over);
        delete static_cast<Owner*>(handed_over);
      },
      held);
}

}  // namespace tfswitch
