#include "record_file.h"

#include <algorithm>
#include <fstream>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tensorflow/core/example/example.pb.h"
#include "tensorflow/core/lib/io/record_reader.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/statusor.h"

namespace tfswitch {
namespace {

using tensorflow::TensorInfo;

std::string InvalidValue(const std::string& name, absl::string_view value,
                         const TensorInfo& info) {
  return absl::StrCat("input '", name, "': '", value, "' is not a value of ",
                      Describe(info));
}

// Reads tf.train.Example.
class ExampleFile final : public RecordFile {
 public:
  ExampleFile(const std::string& path,
              const tensorflow::SignatureDef& signature,
              std::unique_ptr<tensorflow::RandomAccessFile> file)
      : RecordFile(path, signature),
        file_(std::move(file)),
        reader_(file_.get(),
                tensorflow::io::RecordReaderOptions::CreateRecordReaderOptions(
                    absl::EndsWith(path, ".gz") ? "GZIP" : "")) {}

  absl::Status Read(NamedValues* rows) override {
    tensorflow::tstring bytes;
    absl::Status status = reader_.ReadRecord(&bytes);
    if (absl::IsOutOfRange(status)) return status;
    ++record_;
    if (!status.ok()) return ErrorHere(std::string(status.message()));
    tensorflow::Example example;
    if (!example.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return ErrorHere("it is not a tf.train.Example");
    }
    const auto& features = example.features().feature();
    for (const auto& [name, info] : inputs_) {
      const auto found = features.find(name);
      if (found == features.end()) {
        std::vector<std::string> names;
        for (const auto& entry : features) names.push_back(entry.first);
        std::sort(names.begin(), names.end());
        return ErrorHere(absl::StrCat(
            "no feature '", name, "'; it has: ", absl::StrJoin(names, ", ")));
      }
      absl::StatusOr<Values> values = ReadFeature(found->second, info);
      if (!values.ok()) {
        return ErrorHere(
            absl::StrCat("feature '", name, "': ", values.status().message()));
      }
      (*rows)[name] = *std::move(values);
    }
    return absl::OkStatus();
  }

 private:
  static absl::StatusOr<Values> ReadFeature(const tensorflow::Feature& feature,
                                            const TensorInfo& info) {
    Values values;
    TF_ASSIGN_OR_RETURN(values.data, EmptyDataFor(info.dtype()));
    const size_t kind = values.data.index();
    switch (feature.kind_case()) {
      case tensorflow::Feature::kInt64List: {
        const auto& list = feature.int64_list().value();
        values.data = Integers(list.begin(), list.end());
        break;
      }
      case tensorflow::Feature::kFloatList: {
        const auto& list = feature.float_list().value();
        values.data = Floats(list.begin(), list.end());
        break;
      }
      case tensorflow::Feature::kBytesList: {
        const auto& list = feature.bytes_list().value();
        values.data = Strings(list.begin(), list.end());
        break;
      }
      case tensorflow::Feature::KIND_NOT_SET:  // An empty list.
        break;
    }
    if (values.data.index() != kind) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the input takes ", Describe(info), ", and this is another list"));
    }
    const int64_t count = std::visit(
        [](const auto& data) { return static_cast<int64_t>(data.size()); },
        values.data);
    TF_ASSIGN_OR_RETURN(values.shape, RowShape(info, count));
    return values;
  }

  const std::unique_ptr<tensorflow::RandomAccessFile> file_;
  tensorflow::io::SequentialRecordReader reader_;
};

// The cells of a line; false if a quote is not closed.
bool SplitCells(absl::string_view line, std::vector<std::string>* cells) {
  cells->assign(1, "");
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quoted) {
      if (c != '"') {
        cells->back() += c;
      } else if (i + 1 < line.size() && line[i + 1] == '"') {
        cells->back() += line[++i];
      } else {
        quoted = false;
      }
    } else if (c == '"' && cells->back().empty()) {
      quoted = true;
    } else if (c == ',') {
      cells->emplace_back();
    } else {
      cells->back() += c;
    }
  }
  return !quoted;
}

class CsvFile final : public RecordFile {
 public:
  CsvFile(const std::string& path, const tensorflow::SignatureDef& signature,
          char separator)
      : RecordFile(path, signature), separator_(separator), file_(path) {}

  absl::Status ReadHeader() {
    if (!file_) {
      return absl::NotFoundError(absl::StrCat("cannot read '", path_, "'"));
    }
    absl::Status status = ReadLine(&header_);
    if (absl::IsOutOfRange(status)) return ErrorHere("it has no header");
    if (!status.ok()) return status;
    for (const auto& [name, info] : inputs_) {
      const auto found = std::find(header_.begin(), header_.end(), name);
      if (found == header_.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", path_, "' has no column '", name,
            "' for an input of that "
            "name, ",
            Describe(info), "; it has: ", absl::StrJoin(header_, ", ")));
      }
      columns_[name] = found - header_.begin();
    }
    return absl::OkStatus();
  }

  absl::Status Read(NamedValues* rows) override {
    std::vector<std::string> cells;
    TF_RETURN_IF_ERROR(ReadLine(&cells));
    ++record_;
    if (cells.size() != header_.size()) {
      return ErrorHere(absl::StrCat("it has ", cells.size(),
                                    " cells, and the "
                                    "header ",
                                    header_.size()));
    }
    for (const auto& [name, info] : inputs_) {
      const std::string& cell = cells[columns_.at(name)];
      TF_RETURN_IF_ERROR(ReadCell(name, cell, info, &(*rows)[name]));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadLine(std::vector<std::string>* cells) {
    std::string line;
    do {
      if (!std::getline(file_, line)) {
        return absl::OutOfRangeError("end of file");
      }
      if (!line.empty() && line.back() == '\r') line.pop_back();
    } while (line.empty());
    if (!SplitCells(line, cells)) return ErrorHere("a quote is not closed");
    return absl::OkStatus();
  }

  absl::Status ReadCell(const std::string& name, const std::string& cell,
                        const TensorInfo& info, Values* values) const {
    auto data = EmptyDataFor(info.dtype());
    if (!data.ok()) return ErrorHere(std::string(data.status().message()));
    values->data = *std::move(data);
    std::vector<std::string> parts;
    if (info.tensor_shape().dim_size() == 1) {
      parts = {cell};
    } else if (!cell.empty()) {
      parts = absl::StrSplit(cell, separator_);
    }
    for (const std::string& part : parts) {
      bool parsed = true;
      if (auto* integers = std::get_if<Integers>(&values->data)) {
        parsed = absl::SimpleAtoi(part, &integers->emplace_back());
      } else if (auto* floats = std::get_if<Floats>(&values->data)) {
        parsed = absl::SimpleAtof(part, &floats->emplace_back());
      } else {
        std::get<Strings>(values->data).push_back(part);
      }
      if (!parsed) return ErrorHere(InvalidValue(name, part, info));
    }
    auto shape = RowShape(info, static_cast<int64_t>(parts.size()));
    if (!shape.ok()) {
      return ErrorHere(
          absl::StrCat("column '", name, "': ", shape.status().message()));
    }
    values->shape = *std::move(shape);
    return absl::OkStatus();
  }

  const char separator_;
  std::ifstream file_;
  std::vector<std::string> header_;
  std::map<std::string, size_t> columns_;
};

}  // namespace

absl::StatusOr<std::vector<int64_t>> RowShape(const TensorInfo& info,
                                              int64_t count) {
  const auto& dims = info.tensor_shape().dim();
  int64_t known = 1;
  std::vector<int64_t> shape;
  for (int i = 1; i < dims.size(); ++i) {
    shape.push_back(dims[i].size());
    if (dims[i].size() >= 0) known *= dims[i].size();
  }
  const auto unknown = std::find(shape.begin(), shape.end(), -1);
  if (unknown != shape.end() && known > 0 && count % known == 0) {
    *unknown = count / known;
    known = count;
  }
  if (dims.empty() || std::count(shape.begin(), shape.end(), -1) > 0 ||
      known != count) {
    return absl::InvalidArgumentError(
        absl::StrCat(count, " values are not a row of ", Describe(info)));
  }
  return shape;
}

absl::Status RecordFile::ErrorHere(const std::string& message) const {
  return absl::InvalidArgumentError(
      absl::StrCat("'", path_, "', record ", record_, ": ", message));
}

absl::StatusOr<std::unique_ptr<RecordFile>> RecordFile::Open(
    const std::string& path, const tensorflow::SignatureDef& signature,
    char separator) {
  if (absl::EndsWith(path, ".csv")) {
    auto file = std::make_unique<CsvFile>(path, signature, separator);
    TF_RETURN_IF_ERROR(file->ReadHeader());
    return file;
  }
  if (!absl::EndsWith(path, ".tfrecord") &&
      !absl::EndsWith(path, ".tfrecord.gz")) {
    return absl::InvalidArgumentError(
        absl::StrCat("the kind of '", path,
                     "' follows from its name: .csv, "
                     ".tfrecord or .tfrecord.gz"));
  }
  std::unique_ptr<tensorflow::RandomAccessFile> file;
  TF_RETURN_IF_ERROR(
      tensorflow::Env::Default()->NewRandomAccessFile(path, &file));
  return std::make_unique<ExampleFile>(path, signature, std::move(file));
}

}  // namespace tfswitch
