#include "cc/rpc/reflection.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <memory>
#include <vector>

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

void SetReflection(bool is_on, grpc::ServerBuilder* builder) {
  // Its library calls it, too, if the linker has not left the library out.
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  if (!is_on) builder->SetOption(std::make_unique<WithoutReflection>());
}

}  // namespace tfswitch
