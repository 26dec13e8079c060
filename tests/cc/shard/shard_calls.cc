#include "tests/cc/shard/shard_calls.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/shard/control_calls.h"
#include "cc/shard/row_work.h"
#include "cc/wire/codec.h"
#include "cc/wire/report_conversion.h"
#include "google/protobuf/message.h"
#include "google/protobuf/stubs/logging.h"
#include "tfswitch/v1/coordination.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

using google::protobuf::Message;

// Below, calls of rows are done as the data plane does them, and streams as the
// service does. The limit on answers is theirs; it is small, because rows that
// a pull inserts are many where the message is short.
constexpr size_t kMaxAnswerFloats = size_t{1} << 16;

// Copies of arrays, each in a block of its own, so that AddressSanitizer sees
// when one is read past its end.
class Blocks {
 public:
  explicit Blocks(PullRequest* pull) { Move(&pull->keys); }
  explicit Blocks(PushRequest* push) {
    Move(&push->keys);
    Move(&push->gradients);
    Move(&push->observations.counts);
    Move(&push->observations.shows);
    Move(&push->observations.clicks);
  }
  explicit Blocks(AssignRequest* assign) {
    Move(&assign->keys);
    Move(&assign->embeddings);
    Move(&assign->slots);
  }

 private:
  void Move(absl::Span<const Key>* keys) {
    keys_.assign(keys->begin(), keys->end());
    keys_.shrink_to_fit();
    *keys = keys_;
  }
  void Move(absl::Span<const float>* floats) {
    *floats = floats_.emplace_back(floats->begin(), floats->end());
  }

  std::vector<Key> keys_;
  std::deque<std::vector<float>> floats_;
};

absl::Status Pull(Shard& shard, PullRequest pull, v1::PullResponse* response) {
  const Blocks blocks(&pull);
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto table, shard.FindTable({pull.table, pull.table_incarnation}));
  TFSWITCH_RETURN_IF_ERROR(NoteDay(*table, pull.day));
  const size_t num_floats = pull.keys.size() * table->dim();
  if (num_floats > kMaxAnswerFloats) {
    return absl::ResourceExhaustedError("the answer is too long");
  }
  std::vector<float> rows(num_floats);
  const absl::Status status =
      shard.Pull(*table, pull.keys, pull.if_missing(), absl::MakeSpan(rows));
  response->mutable_values()->Add(rows.begin(), rows.end());
  return status;
}

absl::Status Push(Shard& shard, std::vector<PushRequest> requests) {
  std::vector<TablePush> pushes;
  std::deque<Blocks> blocks;
  for (PushRequest& request : requests) {
    blocks.emplace_back(&request);
    TFSWITCH_ASSIGN_OR_RETURN(
        auto table,
        shard.FindTable({request.table, request.table_incarnation}));
    pushes.push_back({std::move(table), &request});
  }
  std::vector<WriteResult> results(pushes.size());
  return shard.PushMany(pushes, absl::MakeSpan(results));
}

absl::Status RunBytes(Shard& shard, absl::string_view bytes,
                      v1::PullResponse* response) {
  DecodeScratch scratch;
  PullRequest pull;
  TFSWITCH_RETURN_IF_ERROR(ReadPullRequest({bytes}, &scratch, &pull));
  return Pull(shard, pull, response);
}

absl::Status RunBytes(Shard& shard, absl::string_view bytes,
                      v1::PullManyResponse* response) {
  PartScratch scratch;
  std::vector<PullRequest> pulls;
  TFSWITCH_RETURN_IF_ERROR(ReadPullManyRequest({bytes}, &scratch, &pulls));
  for (const PullRequest& pull : pulls) {
    TFSWITCH_RETURN_IF_ERROR(Pull(shard, pull, response->add_responses()));
  }
  return absl::OkStatus();
}

absl::Status RunBytes(Shard& shard, absl::string_view bytes,
                      v1::PushResponse*) {
  DecodeScratch scratch;
  std::vector<PushRequest> pushes(1);
  TFSWITCH_RETURN_IF_ERROR(ReadPushRequest({bytes}, &scratch, &pushes[0]));
  return Push(shard, std::move(pushes));
}

absl::Status RunBytes(Shard& shard, absl::string_view bytes,
                      v1::PushManyResponse*) {
  PartScratch scratch;
  std::vector<PushRequest> pushes;
  TFSWITCH_RETURN_IF_ERROR(ReadPushManyRequest({bytes}, &scratch, &pushes));
  return Push(shard, std::move(pushes));
}

absl::Status RunBytes(Shard& shard, absl::string_view bytes,
                      v1::AssignResponse*) {
  DecodeScratch scratch;
  AssignRequest assign;
  TFSWITCH_RETURN_IF_ERROR(ReadAssignRequest({bytes}, &scratch, &assign));
  const Blocks blocks(&assign);
  return shard.AssignOnce(assign).status();
}

absl::Status RunStream(Shard& shard, const v1::ExportRequest& request,
                       v1::ExportResponse*) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            shard.FindTable(TableOf(request)));
  return table->ForEachRow(3, [](const RowChunk&) { return absl::OkStatus(); });
}

absl::Status RunStream(Shard& shard, const v1::ExportChangesRequest& request,
                       v1::ExportChangesResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            shard.FindTable(TableOf(request)));
  ChangeFilter filter;
  filter.since = {request.since().log_id(), request.since().epoch()};
  if (request.has_rule()) {
    filter.rule = ScoreRule{request.rule().base_threshold(),
                            request.rule().delta_threshold(),
                            request.rule().delta_keep_days()};
  }
  if (request.has_day()) filter.day = request.day();
  TFSWITCH_ASSIGN_OR_RETURN(
      const ChangeCursor cursor,
      shard.ExportChanges(table, filter, request.export_id(), 3,
                          [](const ChangeChunk&) { return absl::OkStatus(); }));
  response->mutable_cursor()->set_log_id(cursor.log_id);
  response->mutable_cursor()->set_epoch(cursor.epoch);
  return absl::OkStatus();
}

using Runner = absl::Status (*)(const ShardCall&, const std::string& bytes,
                                Message*);

template <typename Request>
absl::Status RunControl(const ShardCall& call, const std::string& bytes,
                        Message* response) {
  Request request;
  if (!request.ParseFromString(bytes)) {
    return absl::InvalidArgumentError("no such message");
  }
  return RunAny(call, request, response);
}

struct Kind {
  absl::string_view name;
  const Message& request;
  const Message& response;
  Runner run;
};

const std::vector<Kind>& Kinds() {
#define TFSWITCH_KIND(name, run)                             \
  {#name, v1::name##Request::default_instance(),             \
   v1::name##Response::default_instance(),                   \
   [](const ShardCall& call, const std::string& bytes,       \
      Message* any) -> absl::Status {                        \
     auto* response = static_cast<v1::name##Response*>(any); \
     run;                                                    \
   }},
#define TFSWITCH_CONTROL(name) \
  TFSWITCH_KIND(name,          \
                return RunControl<v1::name##Request>(call, bytes, response))
#define TFSWITCH_BYTES(name) \
  TFSWITCH_KIND(name, return RunBytes(call.shard, bytes, response))
#define TFSWITCH_STREAM(name)                                                 \
  TFSWITCH_KIND(name, v1::name##Request request;                              \
                if (!request.ParseFromString(bytes)) return absl::OkStatus(); \
                return RunStream(call.shard, request, response))
  static const auto* const kinds = new std::vector<Kind>{
      TFSWITCH_PARAMETER_SERVER_CALLS(TFSWITCH_CONTROL)
          TFSWITCH_COORDINATION_CALLS(TFSWITCH_CONTROL) TFSWITCH_BYTES(Pull)
              TFSWITCH_BYTES(Push) TFSWITCH_BYTES(PullMany)
                  TFSWITCH_BYTES(PushMany) TFSWITCH_BYTES(Assign)
                      TFSWITCH_STREAM(Export) TFSWITCH_STREAM(ExportChanges)};
  return *kinds;
}

struct Step {
  absl::string_view name;
  const char* text;  // Its message. Fields that it leaves out are filled in.
};

// Tables: t, u with an admission and an eviction, d dense, g of the group w.
constexpr Step kGoodClient[] = {
    {"CreateTable",
     R"(config { name: "t" dim: 4 optimizer { segments { adagrad {} } }
                                num_virtual_shards: 4 })"},
    {"CreateTable", R"(config { name: "u" dim: 2 num_virtual_shards: 4
         optimizer { segments { adam {} options { l2: 0.5 clip_norm: 1 } } }
         statistics { kind: SHOW_CLICK show_click_decay_rate: 0.9 }
         admission { min_count { min_count: 2 } not_admitted { kind: SHARED } }
         eviction { delete_after_unseen_days: 30 delete_threshold: 0.8
                    min_l2_norm: 0.1 max_rows: 3 every_secs: 60 } })"},
    {"CreateTable", R"(config { name: "b" dim: 3 num_virtual_shards: 4
         optimizer { segments { dim: 1 ftrl {} } segments { dim: 2 lion {} } }
         initializer { truncated_normal {} }
         statistics { kind: USAGE }
         admission { bloom_min_count { min_count: 2 capacity: 100 } }
         storage_dtype { embeddings: BFLOAT16 slots: FLOAT16 } })"},
    {"CreateTable", R"(config { name: "d" dim: 2 num_virtual_shards: 4
         optimizer { segments { adamw {} } is_dense: true } })"},
    {"CreateTable", R"(config { name: "g" dim: 2 num_virtual_shards: 4
         optimizer { segments { sgd { momentum: 0.5 } } }
         consistency { kind: BSP } })"},
    {"ListTables", ""},
    {"CreateGroup", R"(group: "w" options { lease_ms: 60000 num_workers: 1
         join_timeout_ms: 60000 contributions_per_round: 1 })"},
    {"Join", R"(group: "w")"},
    {"Heartbeat", R"(member { group: "w" })"},
    {"CreateWorkQueue", R"(group: "w" queue: "q"
         options { items: "a" items: "b" num_epochs: 2 })"},
    {"TakeWorkItem", R"(member { group: "w" } queue: "q")"},
    {"Pull", R"(table: "t" keys: [1, 2, 3, 4] insert_missing: true)"},
    {"Push", R"(table: "u" keys: [1, 2, 2, 3] learning_rate: 0.5
         gradients: [1, 1, 1, 1, 1, 1, 1, 1] insert_missing: true
         counts: [1, 2, 3, 4] shows: [3, 3, 3, 3] clicks: [1, 1, 1, 1]
         global_step: 1 day: 20000 client_id: 1 sequence: 1)"},
    {"PushMany", R"(
         requests { table: "t" keys: [1, 2, 1] learning_rate: 0.5
                    gradients: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
                    insert_missing: true client_id: 1 sequence: 2 }
         requests { table: "d" keys: [5] learning_rate: 0.5 gradients: [1, 1]
                    keys_are_unique: true insert_missing: true }
         requests { table: "b" keys: [5, 5] learning_rate: 0.5
                    gradients: [1, 1, 1, 1, 1, 1] insert_missing: true })"},
    {"PullMany", R"(requests { table: "u" keys: [1, 9] }
                    requests { table: "b" keys: [5] })"},
    {"Assign", R"(table: "t" keys: [7] values: [1, 2, 3, 4] client_id: 1
                  slots: [1, 1, 1, 1] sequence: 3)"},
    {"Push", R"(table: "g" keys: [1, 2] learning_rate: 0.5
         gradients: [1, 1, 1, 1] insert_missing: true group: "w")"},
    {"Arrive", R"(member { group: "w" } weight: 1 wait_ms: 1
                  progress { queue: "q" offset: 1 })"},
    {"WaitForRound", R"(member { group: "w" } wait_ms: 1)"},
    {"CommitRound", R"(group: "w")"},
    {"WaitForTurn", R"(member { group: "w" } wait_ms: 1)"},
    {"WaitAtBarrier", R"(member { group: "w" } barrier: "b" wait_ms: 1)"},
    {"FinishWorkItem", R"(member { group: "w" } queue: "q")"},
    {"GetWorkQueueStats", R"(group: "w" queue: "q")"},
    {"GetGroupStats", R"(group: "w")"},
    {"ReadUsage", R"(table: "u" keys: [1, 2, 9])"},
    {"ReadRows", R"(table: "u" keys: [1, 2, 9])"},
    {"ExportChanges", R"(table: "u" export_id: "e" rule {} day: 20000)"},
    {"CommitExport", R"(table: "u" export_id: "e" commit: true)"},
    {"Export", R"(table: "t" with_slots: true)"},
    {"SaveShard", R"(path: "a" save_id: "i" tables: "t")"},
    {"AbortSave", R"(path: "a" save_id: "i")"},
    {"PauseRounds", R"(save_id: "s" hold_ms: 1000)"},
    {"ChooseSnapshotRound", R"(save_id: "s" with_work_queues: true)"},
    {"SaveShard", R"(path: "a" save_id: "s" all_tables: true)"},
    {"CommitCheckpoint", R"(path: "a" save_id: "s" keep: 2)"},
    {"PauseRounds", R"(save_id: "s")"},
    {"Erase", R"(table: "t" keys: [1, 2] client_id: 1 sequence: 4)"},
    {"Shrink", R"(table: "u" day: 20100)"},
    {"StageRestore", R"(path: "a" restore_id: "r")"},
    {"CommitRestore", R"(restore_id: "r")"},
    {"GetProgress", R"(id: "s")"},
    {"GetMetrics", ""},
    {"Leave", R"(member { group: "w" })"},
    {"DropTable", R"(table: "b" client_id: 1 sequence: 5)"},
};

struct FullStep {
  const Kind* kind;
  std::unique_ptr<Message> request;
};

const std::vector<FullStep>& Steps() {
  static const auto* const steps = [] {
    auto* made = new std::vector<FullStep>;
    const auto add = [&](const Kind& kind, const char* text) {
      made->push_back({&kind, absl::WrapUnique(kind.request.New())});
      MergeText(text, made->back().request.get());
    };
    std::vector<bool> is_known(Kinds().size());
    for (const Step& step : kGoodClient) {
      for (size_t i = 0; i < Kinds().size(); ++i) {
        if (Kinds()[i].name != step.name) continue;
        add(Kinds()[i], step.text);
        is_known[i] = true;
      }
    }
    for (size_t i = 0; i < Kinds().size(); ++i) {
      if (!is_known[i]) add(Kinds()[i], "");
    }
    return made;
  }();
  return *steps;
}

// No input waits long.
void Clamp(const char* name, int64_t most, Message* message) {
  const auto* const field = message->GetDescriptor()->FindFieldByName(name);
  if (field == nullptr) return;
  const google::protobuf::Reflection& reflection = *message->GetReflection();
  reflection.SetInt64(message, field,
                      std::min(most, reflection.GetInt64(*message, field)));
}

}  // namespace

size_t NumShardCalls() { return Steps().size(); }

absl::Status ShardCaller::Call(size_t number, Choices* choices) {
  const google::protobuf::LogSilencer quiet;  // It logs what it refuses.
  const FullStep& step = Steps()[number];
  const auto request = absl::WrapUnique(step.request->New());
  request->CopyFrom(*step.request);
  messages_.FillIn(request.get());
  if (step.kind->name == "CreateTable") {
    static_cast<v1::CreateTableRequest&>(*request).set_protocol_version(
        kProtocolVersion);
  }
  const size_t num_changes = choices->Below(4);
  for (size_t i = 0; i < num_changes; ++i) {
    messages_.Change(choices, request.get());
  }
  Clamp("wait_ms", 1, request.get());
  Clamp("hold_ms", 20, request.get());
  std::string bytes = request->SerializeAsString();
  if (choices->Byte() % 16 == 1) ChangeBytes(choices, &bytes);
  const absl::Time end = SteadyNow() + absl::Milliseconds(20);
  const ShardCall call{shard_, [end] {
                         return SteadyNow() < end
                                    ? absl::OkStatus()
                                    : absl::CancelledError("it takes long");
                       }};
  const auto response = absl::WrapUnique(step.kind->response.New());
  const absl::Status status = step.kind->run(call, bytes, response.get());
  if (status.ok()) messages_.Remember(*response);
  return status;
}

}  // namespace tfswitch
