// libFuzzer target: clients that send a server whatever they like, one call
// after the other.
//
//   control_fuzzer -max_total_time=60 CORPUS
//
// An input says which calls, and what is changed in their messages.

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

constexpr int kMaxCalls = 100;

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
    for (int i = 0; i < kMaxCalls && !choices.IsOver(); ++i) {
      caller.Call(choices.Below(NumShardCalls()), &choices).IgnoreError();
    }
  }
  std::error_code error;
  std::filesystem::remove_all(root, error);
}

}  // namespace

// All calls of a good client, and short runs of them.
std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (const size_t end : {size_t{10}, size_t{25}, NumShardCalls()}) {
    for (char num_shards = 0; num_shards < 2; ++num_shards) {
      std::string& seed = seeds.emplace_back(1, num_shards);
      // Three bytes for each: its number, no changes to its fields or bytes.
      for (size_t call = 0; call < end; ++call) {
        seed += {static_cast<char>(call), 0, 0};
      }
    }
  }
  return seeds;
}

}  // namespace tfswitch

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tfswitch::RunInput(tfswitch::Choices({data, size}));
  return 0;
}
