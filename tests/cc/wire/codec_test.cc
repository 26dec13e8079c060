#include "cc/wire/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/base/cpu_features.h"
#include "cc/wire/half_kernels.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/wire/codec_oracle.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string Bytes(std::initializer_list<int> bytes) {
  std::string result;
  for (int byte : bytes) result.push_back(static_cast<char>(byte));
  return result;
}

absl::Status ReadPull(const std::string& bytes, PullRequest* pull = nullptr) {
  static DecodeScratch scratch;
  PullRequest ignored;
  const absl::string_view piece = bytes;
  return ReadPullRequest({&piece, 1}, &scratch,
                         pull == nullptr ? &ignored : pull);
}

void ExpectMalformed(const std::string& bytes, const std::string& where) {
  const absl::Status status = ReadPull(bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument)
      << absl::CHexEscape(bytes);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("PullRequest"), HasSubstr(where)));
  EXPECT_EQ(CompareWithProtobuf(bytes, 0), "");
}

const Key kKeys[] = {0, -1, std::numeric_limits<Key>::min(),
                     std::numeric_limits<Key>::max(), 42};

TEST(CodecTest, RequestsAreByteForByteThoseOfProtobuf) {
  const std::vector<float> floats = {0.0f, -0.0f, 1.5f, std::nanf(""), -3e38f};

  PullRequest pull;
  pull.table = "user";
  pull.keys = kKeys;
  for (bool insert : {false, true}) {
    pull.insert_missing = insert;
    v1::PullRequest proto;
    proto.set_table("user");
    proto.mutable_keys()->Add(std::begin(kKeys), std::end(kKeys));
    proto.set_insert_missing(insert);
    std::string bytes(PullRequestBytes(pull), '\0');
    WritePullRequest(pull, bytes.data());
    EXPECT_EQ(bytes, proto.SerializeAsString());
    pull.day = 3.0f;
    proto.set_day(3.0f);
    pull.table_incarnation = 7;
    proto.set_table_incarnation(7);
    bytes.assign(PullRequestBytes(pull), '\0');
    WritePullRequest(pull, bytes.data());
    EXPECT_EQ(bytes, proto.SerializeAsString());
    pull.day = kServersDay;
    pull.table_incarnation = 0;
  }

  PushRequest push;
  push.table = "user";
  push.keys = kKeys;
  push.gradients = floats;
  push.learning_rate = -0.0f;
  push.insert_missing = true;
  push.keys_are_unique = true;
  push.id = {std::numeric_limits<uint64_t>::max(), 128};
  v1::PushRequest push_proto;
  push_proto.set_table("user");
  push_proto.mutable_keys()->Add(std::begin(kKeys), std::end(kKeys));
  push_proto.mutable_gradients()->Add(floats.begin(), floats.end());
  push_proto.set_learning_rate(-0.0f);
  push_proto.set_insert_missing(true);
  push_proto.set_keys_are_unique(true);
  push_proto.set_client_id(std::numeric_limits<uint64_t>::max());
  push_proto.set_sequence(128);
  std::string bytes(PushRequestBytes(push), '\0');
  WritePushRequest(push, bytes.data());
  EXPECT_EQ(bytes, push_proto.SerializeAsString());
  const auto in_parts = [&] {
    std::string parts(PushRequestHeadBytes(push), '\0');
    WritePushRequestHead(push, parts.data());
    parts.append(reinterpret_cast<const char*>(floats.data()),
                 4 * floats.size());
    return parts + PushRequestTail(push);
  };
  EXPECT_EQ(in_parts(), bytes);
  for (const StepTag& step :
       {StepTag{"g", 0, 0, 0}, StepTag{"g", 1, 2, 3},
        StepTag{std::string(200, 'g'), std::numeric_limits<uint32_t>::max(),
                std::numeric_limits<uint64_t>::max(),
                std::numeric_limits<int64_t>::max()},
        StepTag{"", 0, 0, -1}}) {
    push.step = step;
    push_proto.set_group(step.group);
    push_proto.set_worker(step.worker);
    push_proto.set_incarnation(step.incarnation);
    push_proto.set_clock(step.clock);
    bytes.assign(PushRequestBytes(push), '\0');
    WritePushRequest(push, bytes.data());
    EXPECT_EQ(bytes, push_proto.SerializeAsString());
    EXPECT_EQ(in_parts(), bytes);
  }
  push.observations = {floats, absl::MakeConstSpan(floats).first(1),
                       absl::MakeConstSpan(floats).last(2)};
  push.global_step = int64_t{1} << 40;
  push.table_incarnation = ~uint64_t{0};
  push_proto.set_table_incarnation(~uint64_t{0});
  push_proto.mutable_counts()->Add(floats.begin(), floats.end());
  push_proto.add_shows(floats[0]);
  push_proto.mutable_clicks()->Add(floats.end() - 2, floats.end());
  push_proto.set_global_step(push.global_step);
  for (const float day : {0.0f, 20779.5f}) {
    push.day = day;
    push_proto.set_day(day);
    bytes.assign(PushRequestBytes(push), '\0');
    WritePushRequest(push, bytes.data());
    EXPECT_EQ(bytes, push_proto.SerializeAsString());
    EXPECT_EQ(in_parts(), bytes);
  }

  AssignRequest assign;
  assign.table = std::string(200, 'x');
  assign.keys = kKeys;
  assign.embeddings = floats;
  assign.slots = floats;
  v1::AssignRequest assign_proto;
  assign_proto.set_table(assign.table);
  assign_proto.mutable_keys()->Add(std::begin(kKeys), std::end(kKeys));
  assign_proto.mutable_values()->Add(floats.begin(), floats.end());
  assign_proto.mutable_slots()->Add(floats.begin(), floats.end());
  bytes.assign(AssignRequestBytes(assign), '\0');
  WriteAssignRequest(assign, bytes.data());
  EXPECT_EQ(bytes, assign_proto.SerializeAsString());
  assign.only_missing = true;
  assign_proto.set_only_missing(true);
  assign.table_incarnation = 1;
  assign_proto.set_table_incarnation(1);
  assign.day = 0.0f;
  assign_proto.set_day(0.0f);
  assign.id = {std::numeric_limits<uint64_t>::max(), 128};
  assign_proto.set_client_id(std::numeric_limits<uint64_t>::max());
  assign_proto.set_sequence(128);
  bytes.assign(AssignRequestBytes(assign), '\0');
  WriteAssignRequest(assign, bytes.data());
  EXPECT_EQ(bytes, assign_proto.SerializeAsString());
}

TEST(CodecTest, RequestsOfDefaultsHaveNoBytes) {
  EXPECT_EQ(PullRequestBytes(PullRequest()), 0u);
  EXPECT_EQ(PushRequestBytes(PushRequest()), 0u);
  EXPECT_EQ(AssignRequestBytes(AssignRequest()), 0u);
}

TEST(CodecTest, ResponsesAreByteForByteThoseOfProtobuf) {
  for (int count : {0, 1, 31, 32, 4096, 600000}) {
    std::vector<float> floats(count);
    std::iota(floats.begin(), floats.end(), 1.0f);
    std::string bytes(kMaxPullResponseHeader, '\0');
    bytes.resize(WritePullResponseHeader(count, bytes.data()));
    bytes.append(reinterpret_cast<const char*>(floats.data()), 4 * count);
    v1::PullResponse proto;
    proto.mutable_values()->Add(floats.begin(), floats.end());
    EXPECT_EQ(bytes, proto.SerializeAsString()) << count << " floats";

    std::vector<float> read(count);
    uint64_t num_floats = 99;
    const CutMessage message(bytes, 9);
    ASSERT_TRUE(
        ReadPullResponse(message.pieces(), absl::MakeSpan(read), &num_floats)
            .ok());
    EXPECT_EQ(num_floats, static_cast<uint64_t>(count));
    EXPECT_EQ(read, floats);
  }
  for (const WriteResult& result :
       {WriteResult{0, false}, WriteResult{53248, true},
        WriteResult{-1, true}}) {
    v1::PushResponse proto;
    proto.set_updated_rows(result.num_rows);
    proto.set_duplicate(result.duplicate);
    EXPECT_EQ(EncodeWriteResponse(result), proto.SerializeAsString());
  }
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{128},
                              std::numeric_limits<int64_t>::max()}) {
    v1::AssignResponse proto;
    proto.set_assigned_rows(count);
    for (const bool duplicate : {false, true}) {
      proto.set_duplicate(duplicate);
      EXPECT_EQ(EncodeWriteResponse({count, duplicate}),
                proto.SerializeAsString());
    }
  }
}

const std::vector<FloatType> kHalfTypes = {FloatType::kFloat16,
                                           FloatType::kBfloat16};

TEST(CodecTest, RowsOf16BitsAreThoseOfProtobufAndKeepTheMarks) {
  // More numbers than are decoded at once. All but the last one are exact.
  std::vector<float> rows(2500);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = 0.25f * (i % 64);
  rows[7] = FloatOfBits(kMissingMark);
  rows.back() = 1.0f + 0x1p-14f;
  for (const FloatType type : kHalfTypes) {
    SCOPED_TRACE(static_cast<int>(type));
    std::string bytes(kMaxPullResponseHeader, '\0');
    bytes.resize(WritePullResponseHeader(rows.size(), bytes.data(), type));
    std::string halves(WireBytes(rows.size(), type), '\0');
    WriteHalfRows(rows, type, halves.data());
    EXPECT_EQ(halves.size(), 2 * rows.size());
    EXPECT_EQ(halves.substr(14, 2), Bytes({0xff, 0x7f}));
    bytes += halves;
    EXPECT_EQ(bytes.size(), PullResponseBytes(rows.size(), type));
    bytes.resize(bytes.size() + kRowsVersionBytes);
    WriteRowsVersion({7, 9}, &bytes[bytes.size() - kRowsVersionBytes]);
    v1::PullResponse proto;
    proto.set_generation(7);
    proto.set_num_pushes(9);
    (type == FloatType::kFloat16 ? proto.mutable_float16_values()
                                 : proto.mutable_bfloat16_values())
        ->assign(halves);
    EXPECT_EQ(bytes, proto.SerializeAsString());

    std::vector<float> expected = rows;
    expected.back() = 1.0f;
    std::vector<float> rounded = rows;
    RoundRows(type, absl::MakeSpan(rounded));
    std::vector<float> read(rows.size() + 3);
    std::vector<int32_t> places(rows.size() / 4);
    std::iota(places.rbegin(), places.rend(), 0);
    uint64_t count = 0;
    for (const uint32_t cut : {0, 7, 11}) {
      const CutMessage message(bytes, cut);
      ASSERT_TRUE(ReadPullResponse(message.pieces(),
                                   absl::MakeSpan(read).first(rows.size()),
                                   &count)
                      .ok());
      EXPECT_EQ(count, rows.size());
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(BitsOfFloat(read[i]), BitsOfFloat(expected[i])) << i;
        ASSERT_EQ(BitsOfFloat(rounded[i]), BitsOfFloat(expected[i])) << i;
      }
      ASSERT_TRUE(ReadPullResponse(message.pieces(),
                                   RowTarget(absl::MakeSpan(read), places, 4),
                                   &count)
                      .ok());
      EXPECT_EQ(read[0], expected[rows.size() - 4]);
      EXPECT_EQ(read[3], 1.0f);
    }
  }
}

TEST(CodecTest, GradientsOf16BitsAreRoundedAtRandomByTheIdOfThePush) {
  std::vector<float> gradients(4000, 1.0f + 0x1p-12f);
  gradients[0] = 0.5f;  // Is exact.
  PushRequest push;
  push.table = "t";
  push.gradients = gradients;
  push.day = 3.0f;
  push.table_incarnation = 9;
  const auto encode = [&push](uint64_t sequence) {
    push.id = {5, sequence};
    std::string bytes(PushRequestBytes(push), '\0');
    WritePushRequest(push, bytes.data());
    return bytes;
  };
  const auto decode = [](const std::string& bytes) {
    DecodeScratch scratch;
    PushRequest read;
    const CutMessage message(bytes, 5);
    EXPECT_TRUE(ReadPushRequest(message.pieces(), &scratch, &read).ok());
    EXPECT_EQ(read.wire_dtype, FloatType::kFloat32);
    EXPECT_EQ(read.table_incarnation, 9u);
    return std::vector<float>(read.gradients.begin(), read.gradients.end());
  };
  for (const FloatType type : kHalfTypes) {
    SCOPED_TRACE(static_cast<int>(type));
    push.wire_dtype = type;
    push.gradients = gradients;
    const std::string bytes = encode(6);
    EXPECT_EQ(encode(6), bytes);
    v1::PushRequest proto;
    ASSERT_TRUE(proto.ParseFromString(bytes));
    EXPECT_EQ(bytes, proto.SerializeAsString());
    EXPECT_EQ(proto.gradients_size(), 0);

    const std::vector<float> rounded = decode(bytes);
    ASSERT_EQ(rounded.size(), gradients.size());
    EXPECT_EQ(rounded[0], 0.5f);
    const double sum = std::accumulate(rounded.begin() + 1, rounded.end(), 0.0);
    EXPECT_NEAR(sum / (rounded.size() - 1), 1.0 + 0x1p-12, 1e-4);
    EXPECT_NE(decode(encode(7)), rounded);
    push.gradients = rounded;
    EXPECT_EQ(encode(6), bytes);
  }
}

TEST(CodecTest, KernelsAgreeForAllInstructionSets) {
  if (BestSimdLevel() != SimdLevel::kAvx2) GTEST_SKIP() << "no AVX2 here";
  std::minstd_rand random(1);
  std::vector<float> floats(4099);
  for (float& value : floats) {
    value = FloatOfBits((random() & 0xffff) | random() << 16);
  }
  floats[5] = FloatOfBits(kMissingMark);
  std::vector<char> halves[2];
  std::vector<float> decoded[2];
  for (const FloatType type : kHalfTypes) {
    for (const bool at_random : {false, true}) {
      for (const int i : {0, 1}) {
        const HalfKernels kernels =
            i == 0 ? scalar::FindHalfKernels() : avx2::FindHalfKernels();
        halves[i].assign(2 * floats.size(), 'x');
        if (at_random) {
          kernels.encode_at_random(type, floats.data(), floats.size(), 3,
                                   halves[i].data());
        } else {
          kernels.encode(type, floats.data(), floats.size(), kMissingMark,
                         halves[i].data());
        }
        decoded[i].assign(floats.size(), 0);
        kernels.decode(type, halves[i].data(), floats.size(), kMissingMark,
                       decoded[i].data());
      }
      EXPECT_EQ(halves[0], halves[1]);
      EXPECT_EQ(0, std::memcmp(decoded[0].data(), decoded[1].data(),
                               floats.size() * sizeof(float)));
      EXPECT_EQ(BitsOfFloat(decoded[0][5]) == kMissingMark, !at_random);
    }
  }
}

TEST(CodecTest, GradientsOf16BitsNeedAnEvenLength) {
  v1::PushRequest proto;
  proto.set_bfloat16_gradients("abc");
  const std::string bytes = proto.SerializeAsString();
  const absl::string_view piece = bytes;
  DecodeScratch scratch;
  PushRequest push;
  const absl::Status status = ReadPushRequest({&piece, 1}, &scratch, &push);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("multiple"));
}

TEST(CodecTest, MessagesOfManyAreByteForByteThoseOfProtobuf) {
  v1::PullManyRequest proto;
  std::string bytes;
  for (const char* table : {"", "user", "item"}) {
    PullRequest pull;
    pull.table = table;
    if (*table != 0) pull.keys = kKeys;
    const uint64_t length = PullRequestBytes(pull);
    char header[kMaxPartHeader];
    bytes.append(header, WritePartHeader(length, header));
    std::string part(length, '\0');
    WritePullRequest(pull, part.data());
    bytes += part;
    v1::PullRequest* request = proto.add_requests();
    request->set_table(table);
    request->mutable_keys()->Add(pull.keys.begin(), pull.keys.end());
  }
  EXPECT_EQ(bytes, proto.SerializeAsString());

  PartScratch scratch;
  std::vector<PullRequest> read;
  const CutMessage message(bytes, 7);
  ASSERT_TRUE(ReadPullManyRequest(message.pieces(), &scratch, &read).ok());
  ASSERT_EQ(read.size(), 3u);
  EXPECT_EQ(read[0].table, "");
  EXPECT_EQ(read[1].table, "user");
  EXPECT_THAT(read[1].keys, testing::ElementsAreArray(kKeys));
  EXPECT_THAT(read[2].keys, testing::ElementsAreArray(kKeys));
}

TEST(CodecTest, MalformedPartIsNamedWithItsPlace) {
  const std::string good = Bytes({0x0a, 3, 0x0a, 1, 'a'});
  const std::string bytes = good + Bytes({0x0a, 2, 0x12, 7});
  const absl::string_view piece = bytes;
  PartScratch scratch;
  std::vector<PushRequest> pushes;

  const absl::Status status =
      ReadPushManyRequest({&piece, 1}, &scratch, &pushes);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("PushManyRequest: part 1: PushRequest: malformed field "
                        "at byte 0 of 2"));
}

TEST(CodecTest, AMessageOfTooManyPartsIsRefused) {
  std::string bytes;
  for (size_t i = 0; i < kMaxPartsPerMessage; ++i) bytes += Bytes({0x0a, 0});
  const auto read = [&] {
    const absl::string_view piece = bytes;
    std::vector<WriteResult> results;
    return ReadPushManyResponse({&piece, 1}, &results);
  };
  EXPECT_TRUE(read().ok());
  bytes += Bytes({0x0a, 0});
  EXPECT_THAT(std::string(read().message()), HasSubstr("more parts"));
}

TEST(CodecTest, LongResponseHeaderFitsItsRoom) {
  char header[kMaxPullResponseHeader];
  EXPECT_LE(
      WritePullResponseHeader(std::numeric_limits<uint64_t>::max() / 4, header),
      kMaxPullResponseHeader);
}

TEST(CodecTest, AlignedArrayInOnePieceIsUsedAsItLies) {
  // tag, length, then keys at offset 8.
  alignas(8) char bytes[8 + 16] = "\x0a\x04user\x12\x10";
  const Key keys[] = {3, -3};
  std::memcpy(bytes + 8, keys, sizeof(keys));
  const absl::string_view piece(bytes, sizeof(bytes));
  DecodeScratch scratch;
  PullRequest pull;

  ASSERT_TRUE(ReadPullRequest({&piece, 1}, &scratch, &pull).ok());

  EXPECT_THAT(pull.keys, ElementsAre(3, -3));
  EXPECT_EQ(reinterpret_cast<const char*>(pull.keys.data()), bytes + 8);
  EXPECT_EQ(scratch.keys.capacity(), 0u);
}

TEST(CodecTest, UnalignedArrayIsMovedToABoundary) {
  v1::PullRequest proto;
  proto.add_keys(3);
  proto.add_keys(-3);
  const std::string bytes = proto.SerializeAsString();  // Keys at offset 2.
  DecodeScratch scratch;
  PullRequest pull;
  const absl::string_view piece = bytes;

  ASSERT_TRUE(ReadPullRequest({&piece, 1}, &scratch, &pull).ok());

  EXPECT_THAT(pull.keys, ElementsAre(3, -3));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pull.keys.data()) % 64, 0u);
}

TEST(CodecTest, ChunksAndSingleNumbersOfAFieldAreJoined) {
  // The first chunk is used in place, where it lies aligned, until the next
  // number shows that it cannot be.
  const auto chunk = [](std::vector<Key> keys) {
    v1::PullRequest proto;
    proto.mutable_keys()->Add(keys.begin(), keys.end());
    return proto.SerializeAsString();
  };
  const std::string single = Bytes({0x11, 9, 0, 0, 0, 0, 0, 0, 0});
  const std::string joined =
      chunk({1, 2}) + single + chunk({3}) + chunk({}) + single;
  for (int shift = 0; shift < 8; ++shift) {
    std::vector<char> block(joined.size() + shift);
    std::copy(joined.begin(), joined.end(), block.begin() + shift);
    const absl::string_view piece(block.data() + shift, joined.size());
    DecodeScratch scratch;
    PullRequest pull;
    ASSERT_TRUE(ReadPullRequest({&piece, 1}, &scratch, &pull).ok());
    EXPECT_THAT(pull.keys, ElementsAre(1, 2, 9, 3, 9));
  }
}

TEST(CodecTest, ScratchIsReusedAndDoesNotLeakIntoTheNextMessage) {
  DecodeScratch scratch;
  for (int count : {1000, 10, 0, 3000}) {
    v1::PushRequest proto;
    for (int i = 0; i < count; ++i) {
      proto.add_keys(i);
      proto.add_gradients(static_cast<float>(i));
    }
    const std::string bytes = proto.SerializeAsString();
    const CutMessage message(bytes, 5);
    PushRequest push;
    ASSERT_TRUE(ReadPushRequest(message.pieces(), &scratch, &push).ok());
    ASSERT_EQ(push.keys.size(), static_cast<size_t>(count));
    ASSERT_EQ(push.gradients.size(), static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(push.keys[i], i);
      ASSERT_EQ(push.gradients[i], static_cast<float>(i));
    }
  }
  const size_t small = scratch.keys.capacity();
  scratch.Trim();
  EXPECT_EQ(scratch.keys.capacity(), small);
  ASSERT_TRUE(scratch.keys.Reserve(size_t{65} << 20, 0));
  scratch.Trim();
  EXPECT_EQ(scratch.keys.capacity(), 0u);
}

TEST(CodecTest, ScratchIsBoundedInAll) {
  DecodeScratch scratch;
  ASSERT_TRUE(scratch.keys.Reserve(size_t{30} << 20, 0));
  ASSERT_TRUE(scratch.values.Reserve(size_t{30} << 20, 0));
  scratch.Trim();
  EXPECT_GE(scratch.capacity(), size_t{60} << 20);
  ASSERT_TRUE(scratch.clicks.Reserve(size_t{5} << 20, 0));
  scratch.Trim();
  EXPECT_EQ(scratch.capacity(), 0u);
}

TEST(CodecTest, ScratchOfPartsIsKeptForAsManyAsAreUsual) {
  PartScratch scratch;
  ASSERT_TRUE(scratch.at(255).keys.Reserve(100, 0));
  ASSERT_TRUE(scratch.at(256).keys.Reserve(100, 0));
  scratch.Trim();
  EXPECT_GE(scratch.at(255).capacity(), 100u);
  EXPECT_EQ(scratch.at(256).capacity(), 0u);

  ASSERT_TRUE(scratch.at(1).keys.Reserve(size_t{64} << 20, 0));
  scratch.Trim();
  EXPECT_EQ(scratch.at(1).capacity(), 0u);
  EXPECT_EQ(scratch.at(255).capacity(), 0u);
}

TEST(CodecTest, LastOfARepeatedScalarWins) {
  PullRequest pull;
  ASSERT_TRUE(
      ReadPull(Bytes({0x0a, 1, 'a', 0x18, 1, 0x0a, 1, 'b', 0x18, 0}), &pull)
          .ok());
  EXPECT_EQ(pull.table, "b");
  EXPECT_FALSE(pull.insert_missing);
}

TEST(CodecTest, UnknownFieldsOfEveryWireTypeAreSkipped) {
  PullRequest pull;
  ASSERT_TRUE(ReadPull(Bytes({0x78, 0x96, 0x01})                    // Varint.
                           + Bytes({0x79, 1, 2, 3, 4, 5, 6, 7, 8})  // Fixed64.
                           + Bytes({0x7a, 2, 'x', 'y'})             // Bytes.
                           + Bytes({0x7b, 0x08, 1, 0x13, 0x14, 0x7c})  // Group.
                           + Bytes({0x7d, 1, 2, 3, 4})  // Fixed32.
                           + Bytes({0x10, 5})           // Field 2 as a varint.
                           + Bytes({0x0a, 1, 'a'}),
                       &pull)
                  .ok());
  EXPECT_EQ(pull.table, "a");
  EXPECT_TRUE(pull.keys.empty());
}

TEST(CodecTest, MalformedBytesAreRefusedWithTheirPlace) {
  const std::string good = Bytes({0x0a, 1, 'a'});
  ExpectMalformed(good + Bytes({0x12, 7}), "byte 3 of 5");
  ExpectMalformed(good + Bytes({0x12, 7, 1, 2, 3, 4, 5, 6, 7}), "no multiple");
  ExpectMalformed(good + Bytes({0x11, 1, 2}), "in the middle");
  ExpectMalformed(good + Bytes({0x18}), "in the middle");
  ExpectMalformed(good + Bytes({0x18, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
                                0x80, 0x80, 0x80, 0x01}),
                  "too many bytes");
  ExpectMalformed(Bytes({0xff, 0xff, 0xff, 0xff, 0xff, 0x01}), "byte 0 of 6");
  ExpectMalformed(Bytes({0x00}), "a tag");
  ExpectMalformed(Bytes({0x05, 1, 2, 3, 4}), "a tag");
  ExpectMalformed(Bytes({0x7e, 1}), "a tag");
  ExpectMalformed(Bytes({0x7c}), "a tag");
  ExpectMalformed(Bytes({0x7b, 0x08, 1}), "a group");
  ExpectMalformed(Bytes({0x7b, 0x84, 0x01}), "a group");
  ExpectMalformed(Bytes({0x79, 1}), "in the middle");
  ExpectMalformed(Bytes({0x7d, 1}), "in the middle");
  ExpectMalformed(Bytes({0x7a, 5, 1}), "past the end");
  ExpectMalformed(Bytes({0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f}), "past the end");
  ExpectMalformed(Bytes({0x0a, 2, 0xc3, 0x28}), "UTF-8");
  ExpectMalformed(Bytes({0x0a, 3, 0xed, 0xa0, 0x80}), "UTF-8");
  ExpectMalformed(Bytes({0x0a, 2, 0xc0, 0x80}), "UTF-8");
  ExpectMalformed(Bytes({0x0a, 1, 0xe2}), "UTF-8");
}

TEST(CodecTest, GroupsNestAsDeepAsProtobufAllows) {
  for (int depth : {1, 99, 100, 101, 5000}) {
    std::string bytes(depth, '\x7b');
    bytes += std::string(depth, '\x7c');
    EXPECT_EQ(ReadPull(bytes).ok(), depth <= 100) << depth;
    EXPECT_EQ(CompareWithProtobuf(bytes, 0), "") << depth;
  }
}

TEST(CodecTest, PullResponseLongerThanItsRoomIsCountedNotCopied) {
  v1::PullResponse proto;
  for (int i = 0; i < 10; ++i) proto.add_values(static_cast<float>(i));
  const std::string bytes = proto.SerializeAsString();
  const CutMessage message(bytes, 2);
  std::vector<float> room(4, -1.0f);
  uint64_t num_floats = 0;

  ASSERT_TRUE(ReadPullResponse(message.pieces(),
                               absl::MakeSpan(room).subspan(0, 3), &num_floats)
                  .ok());

  EXPECT_EQ(num_floats, 10u);
  EXPECT_THAT(room, ElementsAre(0.0f, 1.0f, 2.0f, -1.0f));
}

TEST(CodecTest, EveryTruncationOfEveryMessageIsJudgedAsProtobufDoes) {
  for (const std::string& message : SeedMessages()) {
    for (size_t size = 0; size <= message.size(); ++size) {
      for (uint32_t cut_seed : {0u, 1u, 3u}) {
        ASSERT_EQ(CompareWithProtobuf(message.substr(0, size), cut_seed), "")
            << absl::CHexEscape(message.substr(0, size));
      }
    }
  }
}

std::string Mutate(std::string bytes, const std::vector<std::string>& seeds,
                   std::mt19937* random) {
  const auto below = [&](size_t limit) {
    return limit == 0 ? 0 : (*random)() % limit;
  };
  for (size_t i = 1 + below(4); i > 0; --i) {
    const size_t at = below(bytes.size() + 1);
    switch (below(6)) {
      case 0:
        if (at < bytes.size()) bytes[at] ^= static_cast<char>(1 << below(8));
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<char>(below(256));
        break;
      case 2:
        bytes.insert(at, below(12), static_cast<char>(below(256)));
        break;
      case 3:
        bytes.erase(at, below(12));
        break;
      case 4:
        bytes.insert(at, seeds[below(seeds.size())]);
        break;
      case 5:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(40)));
        break;
    }
  }
  return bytes;
}

TEST(CodecTest, RandomMutationsAreJudgedAsProtobufDoes) {
  // Another seed per run finds more; a failure prints its input.
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  const std::vector<std::string> seeds = SeedMessages();
  for (int i = 0; i < 20000; ++i) {
    const std::string bytes =
        Mutate(seeds[random() % seeds.size()], seeds, &random);
    ASSERT_EQ(CompareWithProtobuf(bytes, random() % 64), "")
        << absl::CHexEscape(bytes);
  }
}

// Written by version 0.1.0 before requests had one struct for all rooms.
TEST(CodecTest, RecordedMessagesAreRead) {
  const std::string push_bytes = absl::HexStringToBytes(
      "0a047573657212180100000000000000feffffffffffffffffffffffffffff7f1a180000"
      "003f0000c0bf000000400000803f0000803e0000404025cdcccc3d2801300138ffffffff"
      "ffffffffff014081014a0167500358ac0260076a0c0000803f0000004000004040720c00"
      "0080400000a0400000c0407a0c000000000000803f000000008001e8078d0100419c46f1"
      "01874b6b5d54dc2b00");
  const absl::string_view push_piece = push_bytes;
  DecodeScratch scratch;
  PushRequest push;
  ASSERT_TRUE(ReadPushRequest({&push_piece, 1}, &scratch, &push).ok());
  EXPECT_EQ(push.table, "user");
  EXPECT_THAT(push.keys, ElementsAre(1, -2, std::numeric_limits<Key>::max()));
  EXPECT_THAT(push.gradients, ElementsAre(0.5f, -1.5f, 2, 1, 0.25f, 3));
  EXPECT_EQ(push.learning_rate, 0.1f);
  EXPECT_TRUE(push.insert_missing && push.keys_are_unique);
  EXPECT_EQ(push.id.client_id, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(push.id.sequence, 129u);
  EXPECT_EQ(push.step.group, "g");
  EXPECT_EQ(push.step.worker, 3u);
  EXPECT_EQ(push.step.incarnation, 300u);
  EXPECT_EQ(push.step.clock, 7);
  EXPECT_THAT(push.observations.counts, ElementsAre(1, 2, 3));
  EXPECT_THAT(push.observations.shows, ElementsAre(4, 5, 6));
  EXPECT_THAT(push.observations.clicks, ElementsAre(0, 1, 0));
  EXPECT_EQ(push.global_step, 1000);
  EXPECT_EQ(push.day, 20000.5f);
  EXPECT_EQ(push.table_incarnation, 12345678901234567u);
  // And written as they were.
  std::string again(PushRequestBytes(push), '\0');
  WritePushRequest(push, again.data());
  EXPECT_EQ(again, push_bytes);

  const std::string pull_bytes = absl::HexStringToBytes(
      "0a047573657212100100000000000000feffffffffffffff18012500006040f101050000"
      "0000000000");
  const absl::string_view pull_piece = pull_bytes;
  PullRequest pull;
  ASSERT_TRUE(ReadPullRequest({&pull_piece, 1}, &scratch, &pull).ok());
  again.assign(PullRequestBytes(pull), '\0');
  WritePullRequest(pull, again.data());
  EXPECT_EQ(again, pull_bytes);
  EXPECT_EQ(pull.day, 3.5f);

  const std::string assign_bytes = absl::HexStringToBytes(
      "0a047573657212100100000000000000feffffffffffffff1a100000803f000000400000"
      "40400000804022080000a0400000c0402801350000604038014002f10105000000000000"
      "00");
  const absl::string_view assign_piece = assign_bytes;
  AssignRequest assign;
  ASSERT_TRUE(ReadAssignRequest({&assign_piece, 1}, &scratch, &assign).ok());
  again.assign(AssignRequestBytes(assign), '\0');
  WriteAssignRequest(assign, again.data());
  EXPECT_EQ(again, assign_bytes);
  EXPECT_THAT(assign.slots, ElementsAre(5, 6));
}

}  // namespace
}  // namespace tfswitch
