// libFuzzer target: checkpoints that lie about themselves.
//
//   checkpoint_fuzzer -max_total_time=60 CORPUS
//
// An input says what is changed in a manifest and in the header of a file that
// it names, which are good before, and in their bytes.

#include <zlib.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/base/files.h"
#include "cc/base/json.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/wire/json.h"
#include "tests/cc/testing/choices.h"
#include "tests/cc/testing/fuzz_target.h"
#include "tests/cc/testing/scoped_folder.h"
#include "tests/cc/testing/snapshots.h"

namespace tfswitch::checkpoint {
namespace {

absl::Status Never() { return absl::OkStatus(); }

// Rows of many inputs would fill the memory.
constexpr int kInputsPerTable = 1000;

constexpr char kData[] = "t/data.safetensors";

std::string Read(const std::string& path) {
  return ReadWholeFile(path, 1 << 20).value();
}

void Write(const std::string& path, absl::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

using Tables = std::vector<std::unique_ptr<EmbeddingTable>>;

// Empty ones that have a file of each kind between them when they are not.
Tables MakeTables() {
  TableConfig config;
  config.name = "t";
  config.dim = 2;
  config.num_virtual_shards = 4;
  config.optimizer = AdagradConfig{};
  Tables tables;
  tables.push_back(EmbeddingTable::Create(config).value());
  config.admission.policy = MinCountAdmission{2};
  tables.push_back(EmbeddingTable::Create(config).value());
  BloomMinCountAdmission bloom;
  bloom.min_count = 2;
  bloom.capacity = 100;
  config.admission.policy = bloom;
  tables.push_back(EmbeddingTable::Create(config).value());
  return tables;
}

// A manifest, and a file that it names kData.
struct Seed {
  Json manifest;
  Json header;
  std::string body;  // The bytes of the file after the header.
};

std::vector<Seed> MakeSeeds(const ScopedFolder& folder) {
  std::vector<Seed> seeds;
  for (const auto& table : MakeTables()) {
    const std::vector<Key> keys = {1, 2, 3, 4};
    const std::vector<float> gradients(8, 1.0f);
    // The first two keys twice: the others wait to be admitted.
    for (const size_t num_keys : {size_t{4}, size_t{2}}) {
      GradientBatch batch;
      batch.keys = absl::MakeConstSpan(keys).first(num_keys);
      batch.gradients = absl::MakeConstSpan(gradients).first(2 * num_keys);
      batch.learning_rate = 0.5f;
      batch.insert_missing = true;
      if (!table->ApplyGradients(batch).ok()) std::abort();
    }
    PartWriter writer(folder.path(), "s1", 0, 1, /*all_tables=*/true, Never);
    writer.SetWorkQueues(v1::SavedWorkQueues());
    if (!AddTable(*table, writer).ok()) std::abort();
    if (!Commit(folder.path(), "s1", {writer.Finish()}, {}).ok()) std::abort();
    Json manifest = ParseJson(Read(folder.path() + "/manifest.json")).value();
    for (Json file : manifest["tables"]["t"]["files"]) {
      const std::string text =
          Read(folder.path() + "/" + file["name"].get<std::string>());
      uint64_t length;
      std::memcpy(&length, text.data(), sizeof(length));
      const size_t body = sizeof(length) + length;
      file["name"] = kData;
      Seed seed = {manifest,
                   ParseJson({text.data() + sizeof(length), length}).value(),
                   text.substr(body)};
      seed.manifest["tables"]["t"]["files"] = Json::array({file});
      seed.manifest["tables"]["t"]["num_rows"] = "0";
      seeds.push_back(std::move(seed));
    }
  }
  return seeds;
}

// Makes the file one of `rows` rows.
void ChangeRows(uint64_t rows, Json* header) {
  for (Json& tensor : *header) {
    if (tensor.is_object() && tensor.contains("shape") &&
        tensor["shape"].is_array() && !tensor["shape"].empty()) {
      tensor["shape"][0] = rows;
    }
  }
}

// Makes the offsets fit the shapes, as sizes are counted in 64 bits.
void FitOffsets(Json* header) {
  uint64_t end = 0;
  for (Json& tensor : *header) {
    if (!tensor.is_object() || !tensor.contains("shape") ||
        !tensor["shape"].is_array()) {
      continue;
    }
    const Json dtype = tensor.value("dtype", Json());
    uint64_t bytes = dtype == "I64" ? 8 : dtype == "U8" ? 1 : 4;
    for (const Json& size : tensor["shape"]) {
      if (size.is_number_unsigned()) bytes *= size.get<uint64_t>();
    }
    tensor["data_offsets"] = {end, end + bytes};
    end += bytes;
  }
}

void ReadInput(Choices choices) {
  static const ScopedFolder folder("/dev/shm");
  static const std::vector<Seed> seeds = MakeSeeds(folder);
  static Tables tables = MakeTables();
  static int num_inputs = 0;
  if (++num_inputs % kInputsPerTable == 0) tables = MakeTables();

  Seed seed = seeds[choices.Below(seeds.size())];
  std::optional<uint64_t> rows;
  for (size_t changes = choices.Below(8); changes > 0; --changes) {
    switch (choices.Byte() % 4) {
      case 0:
        ChangeJson(&choices, &seed.manifest);
        break;
      case 1:
        ChangeJson(&choices, &seed.header);
        break;
      case 2:
        rows = choices.Number();
        ChangeRows(*rows, &seed.header);
        break;
      default:
        FitOffsets(&seed.header);
        break;
    }
  }

  std::string text = DumpJson(seed.manifest);
  std::string header = DumpJson(seed.header);
  header.append((8 - header.size() % 8) % 8, ' ');  // As it was written.
  const uint64_t length = header.size();
  std::string data = absl::StrCat(
      absl::string_view(reinterpret_cast<const char*>(&length), sizeof(length)),
      header, seed.body);
  while (!choices.IsOver()) {
    ChangeBytes(&choices, choices.Byte() % 2 == 0 ? &data : &text);
  }
  Write(absl::StrCat(folder.path(), "/", kData), data);
  v1::CheckpointPart part;
  MessageFromJson(text, "part", part.mutable_manifest()).IgnoreError();
  part.set_num_shards(1);
  part.set_all_tables(true);
  Commit(folder.path(), "s1", {part}, {}).status().IgnoreError();
  Write(folder.path() + "/manifest.json", text);
  absl::StatusOr<v1::CheckpointManifest> manifest = ReadManifest(folder.path());
  if (!manifest.ok()) return;
  for (auto& [name, saved] : *manifest->mutable_tables()) {
    // The maker of a file also makes its checksum.
    for (v1::CheckpointFile& file : *saved.mutable_files()) {
      if (rows.has_value()) file.set_num_rows(static_cast<int64_t>(*rows));
      file.set_name(kData);
      file.set_bytes(static_cast<int64_t>(data.size()));
      file.set_crc32(static_cast<uint32_t>(
          crc32(0, reinterpret_cast<const Bytef*>(data.data()),
                static_cast<uInt>(data.size()))));
    }
    for (const auto& table : tables) {
      LoadTable(folder.path(), saved, 0, 1, Never, *table).IgnoreError();
      LoadTable(folder.path(), saved, 1, 2, Never, *table).IgnoreError();
    }
  }
}

}  // namespace
}  // namespace tfswitch::checkpoint

// Each file, as it is and with a change of each kind.
std::vector<std::string> tfswitch::FuzzSeeds() {
  std::vector<std::string> seeds;
  for (char file = 0; file < 5; ++file) {
    seeds.push_back({file});
    for (char kind = 0; kind < 4; ++kind) {
      seeds.push_back({file, 2, kind, 1, 7, 5, 6, 3});
      seeds.push_back({file, 0, kind, 40, 3, kind, 0, 2});
    }
  }
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tfswitch::checkpoint::ReadInput(tfswitch::Choices({data, size}));
  return 0;
}
