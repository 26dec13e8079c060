#include "tests/cc/wire/codec_oracle.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "cc/wire/codec.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/unknown_field_set.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

template <typename Proto>
bool Parse(absl::string_view bytes, Proto* proto) {
  return proto->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

// Bits, so that NaN equals itself.
template <typename Span, typename Repeated>
bool SameBits(const Span& span, const Repeated& repeated) {
  return span.size() == static_cast<size_t>(repeated.size()) &&
         (span.empty() || std::memcmp(span.data(), repeated.data(),
                                      span.size() * sizeof(span[0])) == 0);
}

bool SameBits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

std::string Disagree(const char* message, bool accepted_by_protobuf,
                     const absl::Status& ours) {
  return absl::StrCat(message, ": protobuf ",
                      accepted_by_protobuf ? "accepts" : "refuses",
                      ", the codec says ", ours.ToString());
}

// Whether a message has fields of 16-bit numbers, `first_field` or the next. To
// protobuf they are bytes of any length, and only the last one counts, so it
// cannot be compared.
bool HasHalves(absl::string_view bytes, int first_field, bool is_many = false) {
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return false;
  }
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.type() != google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      continue;
    }
    if (is_many && field.number() == 1 &&
        HasHalves(field.length_delimited(), first_field)) {
      return true;
    }
    if (!is_many &&
        (field.number() == first_field || field.number() == first_field + 1)) {
      return true;
    }
  }
  return false;
}
constexpr int kHalfValues = 2;
constexpr int kHalfGradients = 18;

bool SameValues(const PullRequest& ours, const v1::PullRequest& theirs) {
  return ours.table == theirs.table() && SameBits(ours.keys, theirs.keys()) &&
         ours.insert_missing == theirs.insert_missing() &&
         ours.mark_missing == theirs.mark_missing() &&
         (static_cast<int>(ours.wire_dtype) == theirs.wire_dtype() ||
          !v1::StorageDtypeConfig::FloatType_IsValid(theirs.wire_dtype())) &&
         ours.table_incarnation == theirs.table_incarnation();
}

bool SameValues(const PushRequest& ours, const v1::PushRequest& theirs) {
  return ours.table == theirs.table() && SameBits(ours.keys, theirs.keys()) &&
         SameBits(ours.gradients, theirs.gradients()) &&
         SameBits(ours.learning_rate, theirs.learning_rate()) &&
         ours.insert_missing == theirs.insert_missing() &&
         ours.keys_are_unique == theirs.keys_are_unique() &&
         ours.id.client_id == theirs.client_id() &&
         ours.id.sequence == theirs.sequence() &&
         ours.step.group == theirs.group() &&
         ours.step.worker == theirs.worker() &&
         ours.step.incarnation == theirs.incarnation() &&
         ours.step.clock == theirs.clock() &&
         ours.table_incarnation == theirs.table_incarnation();
}

std::string ComparePull(absl::string_view bytes, MessagePieces pieces) {
  v1::PullRequest theirs;
  const bool accepted = Parse(bytes, &theirs);
  DecodeScratch scratch;
  PullRequest ours;
  const absl::Status status = ReadPullRequest(pieces, &scratch, &ours);
  if (accepted != status.ok()) return Disagree("PullRequest", accepted, status);
  if (!accepted) return "";
  return SameValues(ours, theirs) ? "" : "PullRequest: values differ";
}

std::string ComparePush(absl::string_view bytes, MessagePieces pieces) {
  v1::PushRequest theirs;
  const bool accepted = Parse(bytes, &theirs);
  DecodeScratch scratch;
  PushRequest ours;
  const absl::Status status = ReadPushRequest(pieces, &scratch, &ours);
  if (HasHalves(bytes, kHalfGradients)) {
    if (!status.ok()) return "";
    theirs.mutable_gradients()->Assign(ours.gradients.begin(),
                                       ours.gradients.end());
  }
  if (accepted != status.ok()) return Disagree("PushRequest", accepted, status);
  if (!accepted) return "";
  return SameValues(ours, theirs) ? "" : "PushRequest: values differ";
}

template <typename Proto, typename Decoded, typename Read>
std::string CompareMany(const char* message, absl::string_view bytes,
                        MessagePieces pieces, Read read) {
  Proto theirs;
  const bool accepted = Parse(bytes, &theirs);
  PartScratch scratch;
  std::vector<Decoded> ours;
  const absl::Status status = read(pieces, &scratch, &ours);
  if (HasHalves(bytes, kHalfGradients, /*is_many=*/true)) return "";
  if (accepted != status.ok()) return Disagree(message, accepted, status);
  if (!accepted) return "";
  bool same = ours.size() == static_cast<size_t>(theirs.requests_size());
  for (size_t i = 0; same && i < ours.size(); ++i) {
    same = SameValues(ours[i], theirs.requests(static_cast<int>(i)));
  }
  return same ? "" : absl::StrCat(message, ": values differ");
}

std::string ComparePullMany(absl::string_view bytes, MessagePieces pieces) {
  return CompareMany<v1::PullManyRequest, PullRequest>(
      "PullManyRequest", bytes, pieces, ReadPullManyRequest);
}

std::string ComparePushMany(absl::string_view bytes, MessagePieces pieces) {
  return CompareMany<v1::PushManyRequest, PushRequest>(
      "PushManyRequest", bytes, pieces, ReadPushManyRequest);
}

std::string ComparePullManyResponse(absl::string_view bytes,
                                    MessagePieces pieces) {
  v1::PullManyResponse theirs;
  const bool accepted = Parse(bytes, &theirs);
  // Room for two responses: those beyond must be counted only.
  std::vector<std::vector<float>> floats(2, std::vector<float>(8, 0.0f));
  const RowTarget rooms[] = {absl::MakeSpan(floats[0]),
                             absl::MakeSpan(floats[1])};
  std::vector<uint64_t> counts;
  std::vector<RowsVersion> versions;
  const absl::Status status =
      ReadPullManyResponse(pieces, rooms, &counts, &versions);
  if (HasHalves(bytes, kHalfValues, /*is_many=*/true)) return "";
  if (accepted != status.ok()) {
    return Disagree("PullManyResponse", accepted, status);
  }
  if (!accepted) return "";
  bool same = counts.size() == static_cast<size_t>(theirs.responses_size());
  for (size_t i = 0; same && i < counts.size(); ++i) {
    const v1::PullResponse& response = theirs.responses(static_cast<int>(i));
    const auto& values = response.values();
    same = counts[i] == static_cast<uint64_t>(values.size()) &&
           versions[i].generation == response.generation() &&
           versions[i].num_pushes == response.num_pushes();
    const size_t kept = i < 2 ? std::min<size_t>(8, counts[i]) : 0;
    same = same && (kept == 0 || std::memcmp(floats[i].data(), values.data(),
                                             kept * sizeof(float)) == 0);
  }
  return same ? "" : "PullManyResponse: values differ";
}

std::string ComparePushManyResponse(absl::string_view bytes,
                                    MessagePieces pieces) {
  v1::PushManyResponse theirs;
  const bool accepted = Parse(bytes, &theirs);
  std::vector<WriteResult> ours;
  const absl::Status status = ReadPushManyResponse(pieces, &ours);
  if (accepted != status.ok()) {
    return Disagree("PushManyResponse", accepted, status);
  }
  if (!accepted) return "";
  bool same = ours.size() == static_cast<size_t>(theirs.responses_size());
  for (size_t i = 0; same && i < ours.size(); ++i) {
    const v1::PushResponse& response = theirs.responses(static_cast<int>(i));
    same = ours[i].num_rows == response.updated_rows() &&
           ours[i].duplicate == response.duplicate() &&
           ours[i].version.generation == response.generation() &&
           ours[i].version.num_pushes == response.num_pushes();
  }
  return same ? "" : "PushManyResponse: values differ";
}

std::string CompareAssign(absl::string_view bytes, MessagePieces pieces) {
  v1::AssignRequest theirs;
  const bool accepted = Parse(bytes, &theirs);
  DecodeScratch scratch;
  AssignRequest ours;
  const absl::Status status = ReadAssignRequest(pieces, &scratch, &ours);
  if (accepted != status.ok()) {
    return Disagree("AssignRequest", accepted, status);
  }
  if (!accepted) return "";
  const bool same = ours.table == theirs.table() &&
                    SameBits(ours.keys, theirs.keys()) &&
                    SameBits(ours.embeddings, theirs.values()) &&
                    SameBits(ours.slots, theirs.slots()) &&
                    ours.only_missing == theirs.only_missing() &&
                    ours.id.client_id == theirs.client_id() &&
                    ours.id.sequence == theirs.sequence();
  return same ? "" : "AssignRequest: values differ";
}

std::string ComparePullResponse(absl::string_view bytes, MessagePieces pieces) {
  v1::PullResponse theirs;
  const bool accepted = Parse(bytes, &theirs);
  // Room for all but three floats: what does not fit must be counted only.
  const size_t room = theirs.values_size() > 3 ? theirs.values_size() - 3 : 8;
  std::vector<float> floats(room, 0.0f);
  uint64_t count = 0;
  const absl::Status status =
      ReadPullResponse(pieces, absl::MakeSpan(floats), &count);
  if (HasHalves(bytes, kHalfValues)) return "";
  if (accepted != status.ok()) {
    return Disagree("PullResponse", accepted, status);
  }
  if (!accepted) return "";
  const size_t kept = std::min<size_t>(room, count);
  const bool same =
      count == static_cast<uint64_t>(theirs.values_size()) &&
      (kept == 0 || std::memcmp(floats.data(), theirs.values().data(),
                                kept * sizeof(float)) == 0);
  return same ? "" : "PullResponse: values differ";
}

std::string ComparePushResponse(absl::string_view bytes, MessagePieces pieces) {
  v1::PushResponse theirs;
  const bool accepted = Parse(bytes, &theirs);
  WriteResult ours;
  const absl::Status status = ReadWriteResponse("PushResponse", pieces, &ours);
  if (accepted != status.ok()) {
    return Disagree("PushResponse", accepted, status);
  }
  if (!accepted) return "";
  const bool same = ours.num_rows == theirs.updated_rows() &&
                    ours.duplicate == theirs.duplicate();
  return same ? "" : "PushResponse: values differ";
}

std::string CompareAssignResponse(absl::string_view bytes,
                                  MessagePieces pieces) {
  v1::AssignResponse theirs;
  const bool accepted = Parse(bytes, &theirs);
  WriteResult ours;
  const absl::Status status =
      ReadWriteResponse("AssignResponse", pieces, &ours);
  if (accepted != status.ok()) {
    return Disagree("AssignResponse", accepted, status);
  }
  if (!accepted) return "";
  const bool same = ours.num_rows == theirs.assigned_rows() &&
                    ours.duplicate == theirs.duplicate();
  return same ? "" : "AssignResponse: values differ";
}

}  // namespace

CutMessage::CutMessage(absl::string_view whole, uint32_t cut_seed) {
  std::minstd_rand random(cut_seed);
  // The lengths of pieces differ in scale from seed to seed.
  const size_t longest = size_t{1} << (1 + cut_seed % 11);
  while (!whole.empty()) {
    const size_t size = cut_seed == 0
                            ? whole.size()
                            : std::min(whole.size(), random() % longest);
    const size_t offset = cut_seed == 0 ? 0 : random() % 8;
    blocks_.emplace_back(offset + size);
    std::copy_n(whole.data(), size, blocks_.back().data() + offset);
    pieces_.emplace_back(blocks_.back().data() + offset, size);
    whole.remove_prefix(size);
  }
}

std::string CompareWithProtobuf(absl::string_view bytes, uint32_t cut_seed) {
  const google::protobuf::LogSilencer quiet;  // It logs what it refuses.
  const CutMessage message(bytes, cut_seed);
  for (auto compare :
       {ComparePull, ComparePush, CompareAssign, ComparePullResponse,
        ComparePushResponse, CompareAssignResponse, ComparePullMany,
        ComparePushMany, ComparePullManyResponse, ComparePushManyResponse}) {
    std::string difference = compare(bytes, message.pieces());
    if (!difference.empty()) return difference;
  }
  return "";
}

std::vector<std::string> SeedMessages() {
  std::vector<std::string> messages = {""};
  v1::PullRequest pull;
  pull.set_table("user");
  for (int64_t key : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    pull.add_keys(key);
  }
  pull.set_insert_missing(true);
  pull.set_mark_missing(true);
  pull.set_wire_dtype(v1::StorageDtypeConfig::BFLOAT16);
  messages.push_back(pull.SerializeAsString());

  v1::PushRequest push;
  push.set_table("t\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80");
  for (int i = 0; i < 20; ++i) {
    push.add_keys(i * 1000003);
    push.add_gradients(0.5f * i);
    push.add_gradients(-0.5f * i);
  }
  push.set_learning_rate(0.05f);
  push.set_insert_missing(true);
  push.set_keys_are_unique(true);
  push.set_client_id(0xfedcba9876543210u);
  push.set_sequence(300);
  messages.push_back(push.SerializeAsString());

  push.clear_gradients();
  push.set_float16_gradients("abcdefgh");
  messages.push_back(push.SerializeAsString());

  v1::PushRequest staged_push;
  staged_push.set_table("dense");
  staged_push.add_keys(5);
  staged_push.add_gradients(0.25f);
  staged_push.set_group("gr\xc3\xbcn");
  staged_push.set_worker(0xfedcba98u);
  staged_push.set_incarnation(0xfedcba9876543210u);
  staged_push.set_clock(-2);
  messages.push_back(staged_push.SerializeAsString());

  v1::AssignRequest assign;
  assign.set_table("item");
  assign.add_keys(7);
  assign.add_values(1.0f);
  assign.add_slots(2.0f);
  assign.add_slots(3.0f);
  assign.set_only_missing(true);
  assign.set_client_id(0xfedcba9876543210u);
  assign.set_sequence(300);
  messages.push_back(assign.SerializeAsString());

  v1::PullResponse pull_response;
  for (int i = 0; i < 40; ++i) pull_response.add_values(1.0f / (i + 1));
  messages.push_back(pull_response.SerializeAsString());

  v1::PushResponse push_response;
  push_response.set_updated_rows(-1);
  push_response.set_duplicate(true);
  messages.push_back(push_response.SerializeAsString());

  v1::AssignResponse assign_response;
  assign_response.set_assigned_rows(int64_t{1} << 40);
  assign_response.set_duplicate(true);
  messages.push_back(assign_response.SerializeAsString());

  v1::PullManyRequest pulls;
  *pulls.add_requests() = pull;
  pulls.add_requests();
  pulls.add_requests()->set_table("item");
  messages.push_back(pulls.SerializeAsString());

  v1::PushManyRequest pushes;
  *pushes.add_requests() = push;
  *pushes.add_requests() = staged_push;
  messages.push_back(pushes.SerializeAsString());

  v1::PullManyResponse pulled;
  *pulled.add_responses() = pull_response;
  pulled.add_responses();
  pulled.add_responses()->add_values(2.0f);
  messages.push_back(pulled.SerializeAsString());

  v1::PushManyResponse pushed;
  *pushed.add_responses() = push_response;
  pushed.add_responses();
  messages.push_back(pushed.SerializeAsString());

  // One number at a time, in two chunks, between unknown fields and groups.
  const std::string key("\x11\x01\x00\x00\x00\x00\x00\x00\x80", 9);
  const std::string number("\x1d\x00\x00\x80\x3f", 5);
  const std::string group("\x53\x5b\x08\x01\x5c\x54", 6);
  const std::string unknown("\xaa\x06\x03zzz\xb0\x06\x96\x01", 10);
  messages.push_back(group + key + key + number + unknown + number + key);
  messages.push_back(pull.SerializeAsString() + unknown + key +
                     pull.SerializeAsString());
  return messages;
}

}  // namespace tfswitch
