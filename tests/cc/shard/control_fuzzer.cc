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
constexpr size_t kBytesPerCall = 16;

void RunInput(Choices choices) {
  static const ScopedFolder folder("/dev/shm");
  const std::string root = folder.path() + "/root";
  std::filesystem::create_directory(root);
  ShardOptions options;
  options.num_shards = 1 + choices.Byte() % 2;
  options.checkpoint_root = root;
  options.max_tables = 8;
  options.max_bloom_bytes = 1 << 20;
  options.max_reserved_bytes = 1 << 20;
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
      Choices call = choices.Next(kBytesPerCall);
      caller.Call(call.Below(NumShardCalls()), &call).IgnoreError();
    }
  }
  std::error_code error;
  std::filesystem::remove_all(root, error);
}

}  // namespace

// Each call after those before it, again and again: each time without another
// one of its fields, or the last of its elements, or with another value in it.
std::vector<std::string> FuzzSeeds() {
  const std::string changes[] = {
      {0, 0}, {3, 0}, {12, 9, 63, 9, 63}, {12, 2, 0, 2, 0}};
  std::vector<std::string> seeds;
  for (char call = 0; static_cast<size_t>(call) < NumShardCalls(); ++call) {
    for (const std::string& change : changes) {
      std::string& seed = seeds.emplace_back(std::string{0, call});
      for (char field = 0; field < 12; ++field) {
        std::string bytes = {call, 1, change[0], field};
        bytes += change.substr(1);
        bytes.resize(kBytesPerCall);
        seed += bytes;
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
