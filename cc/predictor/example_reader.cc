#include "tfswitch/example_reader.h"

#include <utility>

#include "cc/predictor/errors.h"
#include "cc/predictor/example_parser.h"
#include "cc/predictor/record_reader.h"

namespace tfswitch {

struct ExampleReader::File {
  RecordReader records;
};

ExampleReader::ExampleReader(std::unique_ptr<File> file)
    : file_(std::move(file)) {}

ExampleReader::~ExampleReader() = default;

Result<std::unique_ptr<ExampleReader>> ExampleReader::Open(
    const std::string& path) {
  Result<RecordReader> reader = RecordReader::Open(path);
  if (!reader.ok()) return reader.status();
  return std::unique_ptr<ExampleReader>(
      new ExampleReader(std::make_unique<File>(File{*std::move(reader)})));
}

Result<Features> ExampleReader::Read() {
  const Result<std::string> record = file_->records.Read();
  if (!record.ok()) return record.status();
  Features features;
  if (!ParseExample(*record, &features)) {
    return Error(StatusCode::kDataLoss, "it is not a tf.train.Example");
  }
  return features;
}

}  // namespace tfswitch
