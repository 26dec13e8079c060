// A client that passes calls on, for tests to override some of them.

#ifndef TFSWITCH_TESTS_CC_TESTING_FORWARDING_CLIENT_H_
#define TFSWITCH_TESTS_CC_TESTING_FORWARDING_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

class ForwardingClient : public ParameterClient {
 public:
  explicit ForwardingClient(std::shared_ptr<ParameterClient> client)
      : client_(std::move(client)) {}

  std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response, absl::Duration timeout) override {
    return client_->StartCall(request, response, timeout);
  }
  absl::Duration timeout() const override { return client_->timeout(); }
  absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                     const TableIdentity& identity,
                                     uint64_t replaced_incarnation) override {
    return client_->MakeTable(config, identity, replaced_incarnation);
  }
  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    return client_->ShardInstances();
  }
  absl::Status DropTable(const std::string& table) override {
    return client_->DropTable(table);
  }
  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table) override {
    return client_->ListTables(table);
  }
  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override {
    return client_->StartPull(parts);
  }
  std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> parts) override {
    return client_->StartCheckedPush(parts);
  }
  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           WriteResult* result) override {
    return client_->StartAssign(args, result);
  }
  int num_shards() const override { return client_->num_shards(); }
  std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged) override {
    return client_->StartCommitRound(shard, group, round, committed, staged);
  }
  absl::StatusOr<int64_t> Erase(const TableRef& table,
                                absl::Span<const Key> keys) override {
    return client_->Erase(table, keys);
  }
  absl::Status ReadUsage(const TableRef& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override {
    return client_->ReadUsage(table, keys, day, usage, states);
  }
  absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override {
    return client_->Export(table, with_slots, visit);
  }
  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override {
    return client_->ExportChanges(args, visit);
  }
  absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request, Progress* progress) override {
    return client_->StageRestore(request, progress);
  }
  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override {
    return client_->CommitRestore(restore_id, abort);
  }
  GroupClient& groups() override { return client_->groups(); }

 protected:
  const std::shared_ptr<ParameterClient> client_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_FORWARDING_CLIENT_H_
