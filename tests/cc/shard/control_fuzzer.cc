// libFuzzer target: clients that send a server whatever they like, one call
// after the other.
//
//   control_fuzzer -max_total_time=60 CORPUS
//
// An input says how far a good client came before, then which calls, and what
// is changed in their messages.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/shard/shard.h"
#include "tests/cc/shard/shard_calls.h"
#include "tests/cc/testing/choices.h"
#include "tests/cc/testing/fuzz_target.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

constexpr int kMaxCalls = 50;

void RunInput(Choices choices) {
  static const ScopedFolder folder("/dev/shm");
  const std::string root = folder.path() + "/root";
  std::filesystem::create_directory(root);
  ShardOptions options;
  options.num_shards = 1 + choices.Byte() % 2;
  options.checkpoint_root = root;
  options.max_tables = 8;
  options.max_bloom_bytes = 1 << 20;
  options.max_save_bytes = 1 << 20;
  options.coordinator.max_groups = 4;
  options.coordinator.max_workers = 16;
  options.coordinator.max_work_queues = 4;
  options.coordinator.max_work_queue_bytes = 1 << 16;
  if (!options.Validate().ok()) std::abort();
  {
    Shard shard(options);
    ShardCaller caller(&shard);
    Choices none({});
    const size_t num_good_calls = choices.Below(NumShardCalls());
    for (size_t call = 0; call < num_good_calls; ++call) {
      caller.Call(call, &none).IgnoreError();
    }
    for (int i = 0; i < kMaxCalls && !choices.IsOver(); ++i) {
      caller.Call(choices.Below(NumShardCalls()), &choices).IgnoreError();
    }
  }
  std::error_code error;
  std::filesystem::remove_all(root, error);
}

}  // namespace

// Each call after those before it, with a change and without.
std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (char call = 0; static_cast<size_t>(call) < NumShardCalls(); ++call) {
    const char num_shards = call % 2;
    seeds.push_back({num_shards, call, call, 0, 0});
    seeds.push_back({0, call, call, 3, 3, call, 4, 0, call, 5, 11, call, 6});
  }
  return seeds;
}

}  // namespace tfswitch

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tfswitch::RunInput(tfswitch::Choices({data, size}));
  return 0;
}
