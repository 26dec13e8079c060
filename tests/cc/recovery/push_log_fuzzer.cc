// libFuzzer target: data folders of servers, of which the push log lies.
//
//   push_log_fuzzer -max_total_time=60 CORPUS
//
// An input says what is changed in the records of a good log, which get
// checksums that fit, and then in the bytes of all files of the folder. A
// server that starts with the folder must start a second time.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "cc/base/checksum.h"
#include "cc/base/files.h"
#include "cc/log/push_log.h"
#include "cc/recovery/data_folder.h"
#include "cc/recovery/state_keeper.h"
#include "cc/shard/shard.h"
#include "google/protobuf/message.h"
#include "google/protobuf/stubs/logging.h"
#include "tests/cc/shard/shard_calls.h"
#include "tests/cc/testing/choices.h"
#include "tests/cc/testing/fuzz_target.h"
#include "tests/cc/testing/message_maker.h"
#include "tests/cc/testing/scoped_folder.h"
#include "tfswitch/v1/coordination.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

absl::Status Never() { return absl::OkStatus(); }

// A server without a network.
class Server {
 public:
  explicit Server(const std::string& path) {
    auto folder = DataFolder::Open(path, {});
    status_ = folder.status();
    if (!status_.ok()) return;
    folder_ = *std::move(folder);
    ShardOptions options;
    options.checkpoint_root = DataFolder::CheckpointsOf(path);
    options.num_writes = folder_->num_writes();
    options.max_tables = 8;
    options.max_bloom_bytes = 1 << 20;
    options.max_save_bytes = 1 << 20;
    options.coordinator = {4, 16, 4, 1 << 16};
    shard_.emplace(options);
    StateKeeperOptions keeper;
    keeper.has_log = true;
    keeper.log.sync_every = absl::ZeroDuration();
    keeper_.emplace(keeper, folder_.get(), &*shard_);
    status_ = keeper_->Recover(Never);
  }

  // The status of its start.
  const absl::Status& status() const { return status_; }
  Shard& shard() { return *shard_; }
  absl::Status Save() { return keeper_->Save(Never); }

  int64_t NumRows() const {
    int64_t rows = 0;
    for (const auto& table : shard_->tables().All()) {
      rows += table->stats().num_rows;
    }
    return rows;
  }

 private:
  absl::Status status_;
  std::unique_ptr<DataFolder> folder_;
  std::optional<Shard> shard_;
  std::optional<StateKeeper> keeper_;
};

struct Record {
  uint64_t number = 0;
  uint64_t synced = 0;
  uint64_t payload_bytes = 0;
  uint32_t type = 0;
  std::string payload;
};

// The bytes of a folder's files, by path in it.
using Files = std::map<std::string, std::string>;

struct GoodFolder {
  Files files;  // All files but the log.
  std::vector<Record> records;
};

// Makes the folder of a server that is killed some time after a save.
GoodFolder MakeGoodFolder(const std::string& path) {
  {
    Server server(path);
    if (!server.status().ok()) std::abort();
    ShardCaller client(&server.shard());
    Choices none({});
    for (size_t call = 0; call < NumShardCalls(); ++call) {
      client.Call(call, &none).IgnoreError();
      if (call == 14 && !server.Save().ok()) std::abort();
    }
  }
  GoodFolder good;
  PushLogOptions options;
  options.folder = DataFolder::LogOf(path);
  options.sync_every = absl::ZeroDuration();
  const auto log = PushLog::Open(
      options, 1, 0,
      [&](uint64_t number, uint32_t type, absl::string_view payload) {
        // The others are about a save that comes after them.
        if (type < static_cast<uint32_t>(RecordType::kRestore) ||
            type > static_cast<uint32_t>(RecordType::kRestoreUndone)) {
          good.records.push_back(
              {number, number - 1, payload.size(), type, std::string(payload)});
        }
        return absl::OkStatus();
      });
  if (!log.ok()) std::abort();
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    const std::string name = fs::relative(entry.path(), path);
    if (!entry.is_regular_file() || absl::StartsWith(name, "log/")) continue;
    good.files[name] = ReadWholeFile(entry.path(), 1 << 20).value();
  }
  // Without how far the log had come: a server refuses most changed logs then.
  good.files["writes"].resize(48);
  return good;
}

// Its payload is a day and a message.
void ChangeMessage(Choices* choices, Record* record) {
  static const google::protobuf::Message* const kMessages[] = {
      &v1::PushRequest::default_instance(),
      &v1::PullRequest::default_instance(),
      &v1::AssignRequest::default_instance(),
      &v1::CreateTableRequest::default_instance(),
      &v1::DropTableRequest::default_instance(),
      &v1::EraseRequest::default_instance(),
      &v1::ShrinkRequest::default_instance(),
      &v1::CommitRoundRequest::default_instance(),
  };
  const google::protobuf::LogSilencer quiet;  // It logs what it refuses.
  const std::string day = record->payload.substr(0, sizeof(float));
  const std::string bytes = record->payload.substr(day.size());
  const google::protobuf::Message* kind = nullptr;
  if (record->type - 1 < std::size(kMessages)) {
    kind = kMessages[record->type - 1];
  } else if (record->type == static_cast<uint32_t>(RecordType::kCoordination)) {
    kind = &v1::CoordinationRecord::default_instance();
  }
  if (kind == nullptr) return;
  const std::unique_ptr<google::protobuf::Message> message(kind->New());
  if (!message->ParseFromString(bytes)) return;
  MessageMaker().Change(choices, message.get());
  record->payload = day + message->SerializeAsString();
  record->payload_bytes = record->payload.size();
}

void ChangeRecords(Choices* choices, std::vector<Record>* records) {
  const size_t at = choices->Below(records->size());
  Record& record = (*records)[at];
  switch (choices->Byte() % 10) {
    case 0:
      record.type = choices->Byte() % 16;
      break;
    case 1:
      if (records->size() > 1) {
        records->erase(records->begin() + static_cast<std::ptrdiff_t>(at));
      }
      break;
    case 2:
      records->push_back(record);
      break;
    case 3:
      ChangeBytes(choices, &record.payload);
      record.payload_bytes = record.payload.size();
      break;
    case 4:
      record.number = choices->Number();
      break;
    case 5:
      record.synced = choices->Number();
      break;
    case 6:
      record.payload_bytes = choices->Number();
      break;
    default:
      ChangeMessage(choices, &record);
      break;
  }
}

// As cc/log/push_log.h says.
void AppendRecord(const Record& record, std::string* segment) {
  const uint64_t fields[] = {record.number, record.synced, record.payload_bytes,
                             uint64_t{0x474f4c54} << 32 | record.type};
  std::string payload = record.payload;
  payload.resize((payload.size() + 7) / 8 * 8);
  const uint64_t parts[] = {
      Checksum(reinterpret_cast<const char*>(fields), sizeof(fields)),
      Checksum(payload.data(),
               std::min<uint64_t>(payload.size(), record.payload_bytes))};
  const uint64_t checksum =
      Checksum(reinterpret_cast<const char*>(parts), sizeof(parts));
  segment->append(reinterpret_cast<const char*>(fields), sizeof(fields));
  segment->append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  segment->append(payload);
}

[[noreturn]] void Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::abort();
}

void RunInput(Choices choices) {
  static const ScopedFolder folder("/dev/shm");
  static const GoodFolder good = MakeGoodFolder(folder.path() + "/good");

  std::vector<Record> records = good.records;
  const uint8_t with = choices.Byte();
  for (size_t changes = choices.Below(8); changes > 0; --changes) {
    ChangeRecords(&choices, &records);
  }
  Files files;
  if (with % 2 == 0) files = good.files;
  const size_t per_segment = 1 + choices.Byte() % 64;
  std::string* segment = nullptr;
  // Numbers that nobody has changed follow one another.
  uint64_t next = 1;
  for (size_t i = 0; i < records.size(); ++i, ++next) {
    Record& record = records[i];
    if (record.number <= records.size()) record.number = next;
    if (i % per_segment == 0) {
      segment = &files[absl::StrFormat("log/%020d.log", record.number)];
      *segment = "tfswlog1";
    }
    AppendRecord(record, segment);
  }
  while (!choices.IsOver()) {
    auto file = files.begin();
    std::advance(file, choices.Below(files.size()));
    ChangeBytes(&choices, &file->second);
  }

  const std::string path = folder.path() + "/data";
  for (const auto& [name, bytes] : files) {
    const fs::path file = path + "/" + name;
    fs::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << bytes;
  }
  // Else it is no data folder.
  if (with % 2 != 0) {
    for (const char* name : {"identity.json", "writes"}) {
      std::ofstream(absl::StrCat(path, "/", name), std::ios::binary)
          << good.files.find(name)->second;
    }
  }
  std::optional<Server> first(path);
  if (first->status().ok()) {
    const int64_t num_rows = first->NumRows();
    const bool is_saved = with % 4 < 2 && first->Save().ok();
    first.reset();
    const Server second(path);
    if (!second.status().ok()) Fail("the second start", second.status());
    if (second.NumRows() != num_rows) {
      Fail("the second start", absl::InternalError(absl::StrCat(
                                   second.NumRows(), " rows and not ", num_rows,
                                   is_saved ? ", from a save" : "")));
    }
  }
  first.reset();
  std::error_code error;
  fs::remove_all(path, error);
}

}  // namespace

// With a save and without one, in segments of all lengths, and with a change of
// each kind.
std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (char with = 0; with < 4; ++with) {
    seeds.push_back({with, 0, 2});
    seeds.push_back({with, 0, 63});
    for (char kind = 0; kind < 10; ++kind) {
      seeds.push_back({with, 2, 10, kind, 3, 3, 3, 20, kind, 1, 1, 1, 10});
    }
  }
  return seeds;
}

}  // namespace tfswitch

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tfswitch::RunInput(tfswitch::Choices({data, size}));
  return 0;
}
