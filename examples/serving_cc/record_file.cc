#include "record_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <type_traits>
#include <utility>
#include <variant>

#include "tfswitch/example_reader.h"

namespace example {
using tfswitch::Describe;
using tfswitch::Feature;
using tfswitch::Features;
using tfswitch::Floats;
using tfswitch::Integers;
using tfswitch::NamedValues;
using tfswitch::Result;
using tfswitch::Signature;
using tfswitch::Status;
using tfswitch::StatusCode;
using tfswitch::Strings;
using tfswitch::TensorSpec;
using tfswitch::Values;

namespace {

Status Invalid(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Whether all of a cell is a value of that kind.
bool Parse(const std::string& cell, int64_t* value) {
  return ParseInteger(cell, value);
}
bool Parse(const std::string& cell, float* value) {
  char* end = nullptr;
  *value = std::strtof(cell.c_str(), &end);
  return !cell.empty() && *end == '\0';
}
bool Parse(const std::string& cell, std::string* value) {
  *value = cell;
  return true;
}

// Returns the shape of a row of `count` values. An input may have one unknown
// dimension besides the first: it follows from the number of values.
Result<std::vector<int64_t>> RowShape(const TensorSpec& spec, int64_t count) {
  const bool has_rows = spec.shape && !spec.shape->empty();
  std::vector<int64_t> shape;
  if (has_rows) shape.assign(spec.shape->begin() + 1, spec.shape->end());
  int64_t known = 1;
  for (const int64_t dim : shape) {
    if (dim >= 0) known *= dim;
  }
  const auto unknown = std::find(shape.begin(), shape.end(), -1);
  if (unknown != shape.end() && known > 0 && count % known == 0) {
    *unknown = count / known;
    known = count;
  }
  if (!has_rows || std::count(shape.begin(), shape.end(), -1) > 0 ||
      known != count) {
    return Invalid(std::to_string(count) + " values are not a row of " +
                   Describe(spec));
  }
  return shape;
}

int64_t CountOf(const Values& values) {
  return std::visit(
      [](const auto& data) { return static_cast<int64_t>(data.size()); },
      values.data);
}

// Reads tf.train.Example.
class ExampleFile final : public RecordFile {
 public:
  ExampleFile(const std::string& path, const Signature& signature,
              std::unique_ptr<tfswitch::ExampleReader> reader)
      : RecordFile(path, signature), reader_(std::move(reader)) {}

  Status Read(NamedValues* rows) override {
    Result<Features> features = reader_->Read();
    if (features.status().code() == StatusCode::kOutOfRange) {
      return features.status();
    }
    ++record_;
    if (!features.ok()) return ErrorHere(features.status().message());
    for (const auto& [name, spec] : inputs_) {
      const auto found = features->find(name);
      if (found == features->end()) {
        std::vector<std::string> names;
        for (const auto& entry : *features) names.push_back(entry.first);
        return ErrorHere("no feature '" + name +
                         "'; it has: " + Join(names, ", "));
      }
      Result<Values> values = ReadFeature(&found->second, spec);
      if (!values.ok()) {
        return ErrorHere("feature '" + name +
                         "': " + values.status().message());
      }
      (*rows)[name] = *std::move(values);
    }
    return Status();
  }

 private:
  static Result<Values> ReadFeature(Feature* feature, const TensorSpec& spec) {
    auto data = EmptyDataFor(spec.dtype);
    if (!data.ok()) return data.status();
    Values values;
    values.data = *std::move(data);
    const size_t kind = values.data.index();
    std::visit(
        [&values](auto& list) {
          using List = std::decay_t<decltype(list)>;
          if constexpr (!std::is_same_v<List, std::monostate>) {
            values.data = std::move(list);
          }
        },
        *feature);
    if (values.data.index() != kind) {
      return Invalid("the input takes " + Describe(spec) +
                     ", and this is another list");
    }
    auto shape = RowShape(spec, CountOf(values));
    if (!shape.ok()) return shape.status();
    values.shape = *std::move(shape);
    return values;
  }

  const std::unique_ptr<tfswitch::ExampleReader> reader_;
};

// The cells of a line; false if a quote is not closed.
bool SplitCells(const std::string& line, std::vector<std::string>* cells) {
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
  CsvFile(const std::string& path, const Signature& signature, char separator)
      : RecordFile(path, signature), separator_(separator), file_(path) {}

  Status ReadHeader() {
    if (!file_) {
      return Status(StatusCode::kNotFound, "cannot read '" + path_ + "'");
    }
    Status status = ReadLine(&header_);
    if (status.code() == StatusCode::kOutOfRange) {
      return ErrorHere("it has no header");
    }
    if (!status.ok()) return status;
    for (const auto& [name, spec] : inputs_) {
      const auto found = std::find(header_.begin(), header_.end(), name);
      if (found == header_.end()) {
        return Invalid("'" + path_ + "' has no column '" + name +
                       "' for an input of that name, " + Describe(spec) +
                       "; it has: " + Join(header_, ", "));
      }
      columns_[name] = static_cast<size_t>(found - header_.begin());
    }
    return Status();
  }

  Status Read(NamedValues* rows) override {
    std::vector<std::string> cells;
    Status status = ReadLine(&cells);
    if (!status.ok()) return status;
    ++record_;
    if (cells.size() != header_.size()) {
      return ErrorHere("it has " + std::to_string(cells.size()) +
                       " cells, and the header " +
                       std::to_string(header_.size()));
    }
    for (const auto& [name, spec] : inputs_) {
      const std::string& cell = cells[columns_.at(name)];
      Status read = ReadCell(name, cell, spec, &(*rows)[name]);
      if (!read.ok()) return read;
    }
    return Status();
  }

 private:
  Status ReadLine(std::vector<std::string>* cells) {
    std::string line;
    do {
      if (!std::getline(file_, line)) {
        return Status(StatusCode::kOutOfRange, "end of file");
      }
      if (!line.empty() && line.back() == '\r') line.pop_back();
    } while (line.empty());
    if (!SplitCells(line, cells)) return ErrorHere("a quote is not closed");
    return Status();
  }

  Status ReadCell(const std::string& name, const std::string& cell,
                  const TensorSpec& spec, Values* values) const {
    auto data = EmptyDataFor(spec.dtype);
    if (!data.ok()) return ErrorHere(data.status().message());
    values->data = *std::move(data);
    std::vector<std::string> parts;
    if (spec.shape && spec.shape->size() == 1) {
      parts = {cell};
    } else if (!cell.empty()) {
      parts = Split(cell, separator_);
    }
    for (const std::string& part : parts) {
      const bool is_parsed = std::visit(
          [&part](auto& list) { return Parse(part, &list.emplace_back()); },
          values->data);
      if (!is_parsed) {
        std::string message = "input '";
        message += name;
        message += "': '";
        message += part;
        message += "' is not a value of ";
        message += Describe(spec);
        return ErrorHere(message);
      }
    }
    auto shape = RowShape(spec, CountOf(*values));
    if (!shape.ok()) {
      return ErrorHere("column '" + name + "': " + shape.status().message());
    }
    values->shape = *std::move(shape);
    return Status();
  }

  const char separator_;
  std::ifstream file_;
  std::vector<std::string> header_;
  std::map<std::string, size_t> columns_;
};

}  // namespace

std::string Join(const std::vector<std::string>& texts,
                 const std::string& separator) {
  std::string joined;
  for (size_t i = 0; i < texts.size(); ++i) {
    if (i > 0) joined += separator;
    joined += texts[i];
  }
  return joined;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = 0; end != text.npos; begin = end + 1) {
    end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

bool ParseInteger(const std::string& text, int64_t* value) {
  char* end = nullptr;
  errno = 0;
  *value = std::strtoll(text.c_str(), &end, /*base=*/10);
  return !text.empty() && *end == '\0' && errno == 0;
}

Status RecordFile::ErrorHere(const std::string& message) const {
  return Invalid("'" + path_ + "', record " + std::to_string(record_) + ": " +
                 message);
}

Result<std::unique_ptr<RecordFile>> RecordFile::Open(const std::string& path,
                                                     const Signature& signature,
                                                     char separator) {
  if (EndsWith(path, ".csv")) {
    auto file = std::make_unique<CsvFile>(path, signature, separator);
    Status status = file->ReadHeader();
    if (!status.ok()) return status;
    return file;
  }
  if (!EndsWith(path, ".tfrecord") && !EndsWith(path, ".tfrecord.gz")) {
    return Invalid("the kind of '" + path +
                   "' follows from its name: .csv, .tfrecord or .tfrecord.gz");
  }
  auto reader = tfswitch::ExampleReader::Open(path);
  if (!reader.ok()) return reader.status();
  return std::make_unique<ExampleFile>(path, signature, *std::move(reader));
}

}  // namespace example
