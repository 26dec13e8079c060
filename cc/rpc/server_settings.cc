#include "cc/rpc/server_settings.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cc/rpc/channel_settings.h"

namespace tfswitch {
namespace {

using Plugins = std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>;

// Not thread-safe.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}

  void UpdatePlugins(Plugins* plugins) override {
    const auto name = grpc::reflection::ProtoServerReflectionPlugin().name();
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [&name](const auto& plugin) {
                                    return plugin->name() == name;
                                  }),
                   plugins->end());
  }
};

}  // namespace

void SetMessageLimits(uint64_t max_message_bytes,
                      grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(max_message_bytes));
  // Refuses compressed messages, because gRPC's limits apply to the bytes that
  // arrive, and the inflated message could be a thousand times as long. The
  // first two settings refuse them; the third one keeps gRPC from inflating
  // them before it refuses them.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  // Closes connections of peers that connect and then send nothing.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              kHandshakeTimeoutMs);
}

void SetReflection(bool is_on, grpc::ServerBuilder* builder) {
  // gRPC's reflection library registers itself when it is linked, but the
  // linker may leave the library out. A second registration does no harm.
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  if (!is_on) builder->SetOption(std::make_unique<WithoutReflection>());
}

}  // namespace tfswitch
