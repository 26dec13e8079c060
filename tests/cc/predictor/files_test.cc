// Files that come from others: what they say, and that bytes of any kind are an
// error and nothing worse.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <libdeflate.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "cc/predictor/example_parser.h"
#include "cc/predictor/meta_graph.h"
#include "cc/predictor/record_reader.h"
#include "cc/predictor/wire.h"

namespace tfswitch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Optional;

// Returns a field of a message that holds bytes, or an integer.
std::string Field(uint32_t number, const std::string& bytes) {
  std::string message;
  AppendBytes(number, bytes, &message);
  return message;
}
std::string Field(uint32_t number, int64_t value) {
  std::string message;
  AppendInteger(number, value, &message);
  return message;
}

std::string Dim(int64_t size) { return Field(2, Field(1, size)); }

// A MetaGraphDef with an op and a function in its graph, and a signature with
// one input, int64 [?,2].
std::string Graph(const std::string& tag) {
  const std::string node = Field(1, "n") + Field(2, "Known");
  const std::string call = Field(2, "own_function");
  const std::string function =
      Field(1, Field(1, "own_function")) + Field(3, Field(2, "Other"));
  const std::string spec = Field(1, "in:0") + Field(2, 9) +
                           Field(3, Dim(-1) + Dim(2)) + Field(99, "later");
  const std::string signature =
      Field(1, Field(1, "ids") + Field(2, spec)) +
      Field(4, Field(1, "ids") + Field(2, "a TensorProto"));
  return Field(1, Field(4, tag) + Field(5, "2.99")) +
         Field(2,
               Field(1, node) + Field(1, call) + Field(2, Field(1, function))) +
         Field(5, Field(1, "serving_default") + Field(2, signature));
}

TEST(MetaGraphTest, OpsAndSignaturesAreThoseOfTheGraphWithTheTags) {
  const std::string bytes =
      Field(1, 1) + Field(2, Graph("train")) + Field(2, Graph("serve"));

  const Result<MetaGraph> graph = ParseSavedModel(bytes, {"serve"});

  ASSERT_TRUE(graph.ok()) << graph.status().message();
  EXPECT_EQ(graph->tensorflow_version, "2.99");
  EXPECT_THAT(graph->ops, ElementsAre("Known", "Other"));
  const TensorSpec& ids =
      graph->signatures.at("serving_default").inputs.at("ids");
  EXPECT_EQ(ids.dtype, DataType::kInt64);
  EXPECT_THAT(ids.shape, Optional(ElementsAre(-1, 2)));
  EXPECT_EQ(ids.graph_name, "in:0");
  EXPECT_EQ(graph->defaults.at("serving_default").at("ids"), "a TensorProto");
  EXPECT_EQ(ParseSavedModel(bytes, {"other"}).status().code(),
            StatusCode::kNotFound);
}

TEST(MetaGraphTest, ASparseInputIsNoDenseTensorAndAnUnknownRankNoShape) {
  const auto signature = [](const std::string& spec) {
    return Field(
        5, Field(1, "s") + Field(2, Field(1, Field(1, "x") + Field(2, spec))));
  };
  const auto spec_of = [&](const std::string& spec) {
    return ParseMetaGraph(signature(spec))->signatures.at("s").inputs.at("x");
  };

  EXPECT_EQ(spec_of(Field(4, Field(1, "values:0"))).graph_name, "");
  EXPECT_FALSE(spec_of(Field(3, Field(3, 1))).shape.has_value());
  EXPECT_THAT(spec_of("").shape, Optional(ElementsAre()));
}

// Calls `parse` with the message cut at each place, and with each byte changed.
void ForEachDamage(const std::string& message,
                   const std::function<void(const std::string&)>& parse) {
  for (size_t i = 0; i < message.size(); ++i) {
    parse(message.substr(0, i));
    for (const char mask : {'\x01', '\x07', '\x80', '\xff'}) {
      std::string changed = message;
      changed[i] = static_cast<char>(changed[i] ^ mask);
      parse(changed);
    }
  }
}

TEST(MetaGraphTest, DamagedBytesAreAnErrorOrAnotherGraph) {
  ForEachDamage(Field(2, Graph("serve")), [](const std::string& bytes) {
    const Result<MetaGraph> graph = ParseSavedModel(bytes, {"serve"});
    EXPECT_EQ(graph.ok(), graph.status().message().empty());
  });
  for (const std::string& bytes :
       {std::string("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),  // Length.
        std::string("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        std::string("\x0f"), std::string("\x00", 1)}) {
    EXPECT_EQ(ParseMetaGraph(bytes).status().code(), StatusCode::kDataLoss);
  }
}

TEST(WireTest, GroupsArePassedOverIfTheyEndAndAreNotTooDeep) {
  const auto names = [](const std::string& bytes) {
    return ParseOpNames(bytes + Field(1, Field(1, "Op"))).size();
  };
  const auto nested = [](size_t depth) {
    return std::string(depth, '\x0b') + std::string(depth, '\x0c');
  };

  EXPECT_EQ(names("\x0b" + Field(1, Field(1, "In")) + "\x13\x14\x0c"), 1);
  EXPECT_EQ(names(nested(100)), 1);
  for (const std::string& bytes :
       {nested(101), std::string("\x0b"), std::string("\x0c"),
        std::string("\x0b\x14"), std::string(1 << 20, '\x0b')}) {
    EXPECT_EQ(names(bytes), 0);
    EXPECT_EQ(ParseMetaGraph(bytes).status().code(), StatusCode::kDataLoss);
  }
}

std::string ExampleOf(const std::string& name, const std::string& feature) {
  return Field(1, Field(1, Field(1, name) + Field(2, feature)));
}

TEST(ExampleTest, ListsMayBePackedOrNot) {
  const std::string floats("\0\0\x80\x3f\0\0\0\x40", 8);  // 1, 2
  const std::string bytes =
      ExampleOf("strings", Field(1, Field(1, "a") + Field(1, ""))) +
      ExampleOf("floats", Field(2, Field(1, floats))) +
      ExampleOf("plain", Field(2, "\x0d" + floats.substr(4))) +
      ExampleOf("packed", Field(3, Field(1, "\x03\x80\x01"))) +
      ExampleOf("integers", Field(3, Field(1, -7) + Field(1, 5))) +
      ExampleOf("none", "");
  Features features;

  ASSERT_TRUE(ParseExample(bytes, &features));

  EXPECT_THAT(std::get<Strings>(features["strings"]), ElementsAre("a", ""));
  EXPECT_THAT(std::get<Floats>(features["floats"]), ElementsAre(1, 2));
  EXPECT_THAT(std::get<Floats>(features["plain"]), ElementsAre(2));
  EXPECT_THAT(std::get<Integers>(features["packed"]), ElementsAre(3, 128));
  EXPECT_THAT(std::get<Integers>(features["integers"]), ElementsAre(-7, 5));
  EXPECT_EQ(features["none"].index(), 0);
  ForEachDamage(bytes, [](const std::string& damaged) {
    Features any;
    (void)ParseExample(damaged, &any);
  });
  EXPECT_FALSE(
      ParseExample(ExampleOf("floats", Field(2, Field(1, "abc"))), &features));
}

TEST(ExampleTest, RepeatedNamesReplaceAndRepeatedListsAreOne) {
  const std::string one = Field(3, Field(1, 1));
  const std::string two = Field(3, Field(1, 2));
  const std::string text = Field(1, Field(1, "a"));
  Features features;

  ASSERT_TRUE(ParseExample(ExampleOf("name", one) + ExampleOf("name", two) +
                               ExampleOf("list", one + two) +
                               ExampleOf("kind", one + text) +
                               ExampleOf("none", one) + ExampleOf("none", ""),
                           &features));

  EXPECT_THAT(std::get<Integers>(features["name"]), ElementsAre(2));
  EXPECT_THAT(std::get<Integers>(features["list"]), ElementsAre(1, 2));
  EXPECT_THAT(std::get<Strings>(features["kind"]), ElementsAre("a"));
  EXPECT_EQ(features["none"].index(), 0);
}

std::string RecordOf(const std::string& bytes) {
  const uint64_t size = bytes.size();
  const std::string header(reinterpret_cast<const char*>(&size), 8);
  std::string record;
  for (const std::string& part : {header, bytes}) {
    const uint32_t checksum = MaskedCrc32c(part);
    record += part;
    record.append(reinterpret_cast<const char*>(&checksum), 4);
  }
  return record;
}

class RecordReaderTest : public ::testing::Test {
 protected:
  ~RecordReaderTest() override { std::remove(path_.c_str()); }

  // Two records, "first" and "", with this changed.
  Result<RecordReader> Open(const std::function<void(std::string*)>& change) {
    std::string file = RecordOf("first") + RecordOf("");
    change(&file);
    std::ofstream(path_, std::ios::binary) << file;
    return RecordReader::Open(path_);
  }

  const std::string path_ = ::testing::TempDir() + "files_test.tfrecord";
};

TEST_F(RecordReaderTest, RecordsComeInTheirOrderAndThenTheEnd) {
  Result<RecordReader> reader = Open([](std::string*) {});

  EXPECT_EQ(*reader->Read(), "first");
  EXPECT_EQ(*reader->Read(), "");
  EXPECT_EQ(reader->Read().status().code(), StatusCode::kOutOfRange);
}

TEST_F(RecordReaderTest, AnyBytesThatAreMissingOrChangedAreDataLoss) {
  for (int i = 0; i < 21 + 16; ++i) {
    Result<RecordReader> cut =
        Open([i](std::string* file) { file->resize(file->size() - 1 - i); });
    Status end = cut->Read().status();
    if (end.ok()) end = cut->Read().status();
    // At the end of a record, nothing is missing.
    EXPECT_EQ(end.code() == StatusCode::kOutOfRange, i == 15 || i == 36) << i;
    Result<RecordReader> changed =
        Open([i](std::string* file) { (*file)[i] ^= 1; });
    Status status = changed->Read().status();
    if (i >= 21) {
      EXPECT_TRUE(status.ok());
      status = changed->Read().status();
    }
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << i;
    EXPECT_THAT(status.message(), HasSubstr("corrupted record at "));
  }
}

TEST(MaskedCrc32cTest, IsThatOfTensorFlow) {
  // The checksum of the eight bytes of the length 5, from a file that
  // TensorFlow has written.
  EXPECT_EQ(MaskedCrc32c(std::string("\5\0\0\0\0\0\0\0", 8)), 0x3e04b2eau);
}

class GzipTest : public ::testing::Test {
 protected:
  ~GzipTest() override { std::filesystem::remove(path_); }

  void Write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
  }

  static std::string Compress(const std::string& bytes) {
    const std::unique_ptr<libdeflate_compressor,
                          decltype(&libdeflate_free_compressor)>
        compressor(libdeflate_alloc_compressor(1), &libdeflate_free_compressor);
    std::string member(
        libdeflate_gzip_compress_bound(compressor.get(), bytes.size()), 0);
    member.resize(libdeflate_gzip_compress(compressor.get(), bytes.data(),
                                           bytes.size(), member.data(),
                                           member.size()));
    return member;
  }

  const std::string path_ = ::testing::TempDir() + "files_test.tfrecord.gz";
};

TEST_F(GzipTest, ManyMembersAreOneFile) {
  const std::string large(3 << 20, 'x');
  std::string file;
  const std::string records = RecordOf("first") + RecordOf(large);
  for (size_t i = 0; i < records.size(); i += records.size() / 5) {
    file += Compress(records.substr(i, records.size() / 5));
  }
  Write(file + Compress("") + Compress(RecordOf("last")));

  Result<RecordReader> reader = RecordReader::Open(path_);

  ASSERT_TRUE(reader.ok()) << reader.status().message();
  EXPECT_EQ(*reader->Read(), "first");
  EXPECT_EQ(*reader->Read(), large);
  EXPECT_EQ(*reader->Read(), "last");
  EXPECT_EQ(reader->Read().status().code(), StatusCode::kOutOfRange);
}

TEST_F(GzipTest, AFileThatInflatesBeyondTheLimitIsRefused) {
  const std::string record = RecordOf(std::string(3 << 20, 0));
  Write(Compress(record) + Compress(record));

  EXPECT_TRUE(RecordReader::Open(path_, 2 * record.size()).ok());
  const Status status =
      RecordReader::Open(path_, 2 * record.size() - 1).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(),
              HasSubstr("tfrecord.gz' inflates to more than"));
}

TEST_F(GzipTest, AFileThatIsNotThereOrNotGzipIsAnError) {
  Write("no gzip");
  EXPECT_EQ(RecordReader::Open(path_).status().code(), StatusCode::kDataLoss);
  std::filesystem::remove(path_);
  EXPECT_EQ(RecordReader::Open(path_).status().code(), StatusCode::kNotFound);
}

TEST_F(GzipTest, AFolderIsAnError) {
  std::filesystem::create_directory(path_);

  const Status status = RecordReader::Open(path_).status();

  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("tfrecord.gz': Is a directory"));
  EXPECT_EQ(RecordReader::Open(::testing::TempDir())->Read().status().code(),
            StatusCode::kDataLoss);
}

}  // namespace
}  // namespace tfswitch
