// Writes what a model predicts for each record of a file.
//
//   predict_file --model=/models/ranking --input=clicks.csv --output=scores.csv
//
// The output is CSV: a column per output of the model, a line per record, in
// the order of the input. Several values of a cell are separated.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cc/predictor/predictor.h"
#include "record_file.h"
#include "tensorflow/core/platform/statusor.h"
#include "tensorflow/core/util/command_line_flags.h"

namespace tfswitch {
namespace {

constexpr int kFailed = 1;
constexpr int kBadFlag = 2;

struct Job {
  std::string input;
  std::string output;  // Empty: stdout.
  std::vector<std::string> outputs;
  int64_t batch_size = 0;
  char separator = '|';
};

// Moves a row to a batch, unless it is of another shape than the others.
bool Append(NamedValues* rows, NamedValues* batch) {
  if (batch->empty()) {
    *batch = std::move(*rows);
    return true;
  }
  for (const auto& [name, values] : *rows) {
    if (values.shape != batch->at(name).shape) return false;
  }
  for (auto& [name, values] : *rows) {
    auto& all = batch->at(name).data;
    std::visit(
        [&all](auto& data) {
          auto& to = std::get<std::decay_t<decltype(data)>>(all);
          to.insert(to.end(), std::make_move_iterator(data.begin()),
                    std::make_move_iterator(data.end()));
        },
        values.data);
  }
  return true;
}

std::string Cell(int64_t value) { return absl::StrCat(value); }
std::string Cell(float value) { return absl::StrFormat("%.9g", value); }
std::string Cell(const std::string& value) {
  if (value.find_first_of(",\"\r\n") == std::string::npos) return value;
  return absl::StrCat("\"", absl::StrReplaceAll(value, {{"\"", "\"\""}}), "\"");
}

// A cell with the values of one row.
std::string Cell(const Values& values, int64_t row, char separator) {
  return std::visit(
      [&](const auto& data) {
        const size_t width = data.size() / values.shape[0];
        std::vector<std::string> cells;
        for (size_t i = 0; i < width; ++i) {
          cells.push_back(Cell(data[row * width + i]));
        }
        return absl::StrJoin(cells, std::string(1, separator));
      },
      values.data);
}

// Predicts a batch of `count` rows and writes a line for each.
absl::Status PredictBatch(const Job& job, const Predictor& predictor,
                          int64_t count, NamedValues* batch,
                          std::ostream& lines) {
  for (auto& [name, values] : *batch) {
    values.shape.insert(values.shape.begin(), count);
  }
  TF_ASSIGN_OR_RETURN(const NamedValues predicted,
                      predictor.Predict(*batch, job.outputs));
  std::vector<const Values*> columns;
  for (const std::string& name : job.outputs) {
    const Values& values = predicted.at(name);
    if (values.shape.empty() || values.shape[0] != count) {
      return absl::FailedPreconditionError(absl::StrCat(
          "output '", name, "' does not have a row per record: its shape is [",
          absl::StrJoin(values.shape, ","), "] for ", count,
          " records; choose others with --output_name"));
    }
    columns.push_back(&values);
  }
  for (int64_t row = 0; row < count; ++row) {
    for (size_t i = 0; i < columns.size(); ++i) {
      lines << (i > 0 ? "," : "") << Cell(*columns[i], row, job.separator);
    }
    lines << '\n';
  }
  return absl::OkStatus();
}

absl::Status PredictAll(const Job& job, const Predictor& predictor,
                        RecordFile* file, std::ostream& lines) {
  lines << absl::StrJoin(job.outputs, ",") << '\n';
  NamedValues batch;
  int64_t count = 0;
  int64_t done = 0;
  bool ended = false;
  while (!ended) {
    NamedValues rows;
    absl::Status status = file->Read(&rows);
    ended = absl::IsOutOfRange(status);
    if (!status.ok() && !ended) return status;
    // A batch ends early where the rows begin to have another shape.
    const bool added =
        !ended && count < job.batch_size && Append(&rows, &batch);
    if (added) {
      ++count;
      continue;
    }
    if (count > 0) {
      status = PredictBatch(job, predictor, count, &batch, lines);
      if (!status.ok()) {
        return absl::Status(
            status.code(),
            absl::StrCat("'", job.input, "', records ", done + 1, " to ",
                         done + count, ": ", status.message()));
      }
    }
    done += count;
    batch = std::move(rows);
    count = 1;
  }
  if (!lines.flush()) {
    return absl::DataLossError(
        absl::StrCat("cannot write ", job.output, "; is the disk full?"));
  }
  return absl::OkStatus();
}

// Runs the job. A file appears when it is complete.
absl::Status PredictFile(Job job, const Predictor& predictor) {
  TF_ASSIGN_OR_RETURN(const tensorflow::SignatureDef* const signature,
                      predictor.current()->Signature(""));
  const auto& known = signature->outputs();
  if (job.outputs.empty()) {
    for (const auto& entry : known) job.outputs.push_back(entry.first);
    std::sort(job.outputs.begin(), job.outputs.end());
  }
  for (const std::string& name : job.outputs) {
    if (known.count(name) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "no output '", name, "'; the outputs are ", Describe(known)));
    }
  }
  TF_ASSIGN_OR_RETURN(const std::unique_ptr<RecordFile> file,
                      RecordFile::Open(job.input, *signature, job.separator));
  if (job.output.empty()) {
    return PredictAll(job, predictor, file.get(), std::cout);
  }
  const std::string partial = absl::StrCat(job.output, ".partial-", getpid());
  absl::Status status;
  {
    std::ofstream lines(partial);
    status = PredictAll(job, predictor, file.get(), lines);
  }
  if (status.ok() && std::rename(partial.c_str(), job.output.c_str()) != 0) {
    status =
        absl::UnavailableError(absl::StrCat("cannot write '", job.output, "'"));
  }
  if (!status.ok()) std::remove(partial.c_str());
  return status;
}

int Fail(int code, absl::string_view message) {
  std::fprintf(stderr, "predict_file: %.*s\n", static_cast<int>(message.size()),
               message.data());
  return code;
}

int Run(int argc, char** argv) {
  PredictorOptions options;
  options.op_library = TFSWITCH_OP_LIBRARY;
  options.poll_interval = absl::ZeroDuration();
  options.watch_rows_interval = absl::ZeroDuration();
  Job job;
  job.batch_size = 256;
  std::string output_names;
  std::string separator = "|";
  std::string tags = "serve";
  bool help = false;
  using tensorflow::Flag;
  const std::vector<Flag> flags = {
      Flag("model", &options.model_dir,
           "a SavedModel, or a folder of versions: 1/, 2/, ..."),
      Flag("input", &job.input,
           "a .tfrecord, .tfrecord.gz (tf.train.Example) or .csv file"),
      Flag("output", &job.output, "a CSV file; empty: stdout"),
      Flag("output_name", &output_names,
           "outputs of the model, with commas; empty: all"),
      Flag("batch_size", &job.batch_size, "records that are run together"),
      Flag("separator", &separator, "between several values of a CSV cell"),
      Flag("op_library", &options.op_library,
           "library with the model's own ops; empty: none"),
      Flag("version", &options.version, "of the model; -1: the newest"),
      Flag("signature", &options.model.signature, "of the model"),
      Flag("tags", &tags, "of the graph in the SavedModel, with commas"),
      Flag("help", &help, "prints this text"),
  };
  const bool parsed = tensorflow::Flags::Parse(&argc, argv, flags);
  if (help) {
    std::printf("%s", tensorflow::Flags::Usage(argv[0], flags).c_str());
    return 0;
  }
  if (!parsed) return Fail(kBadFlag, "a flag has a bad value; see --help");
  if (argc > 1) {
    return Fail(kBadFlag,
                absl::StrCat("unknown argument '", argv[1], "'; see --help"));
  }
  if (options.model_dir.empty() || job.input.empty()) {
    return Fail(kBadFlag, "give --model and --input; see --help");
  }
  if (job.batch_size < 1 || separator.size() != 1) {
    return Fail(kBadFlag,
                "--batch_size must be positive, and --separator one character");
  }
  job.separator = separator[0];
  job.outputs = absl::StrSplit(output_names, ',', absl::SkipEmpty());
  options.model.tags = absl::StrSplit(tags, ',');

  const auto predictor = Predictor::Load(options);
  if (!predictor.ok()) return Fail(kFailed, predictor.status().message());
  const absl::Status status = PredictFile(job, **predictor);
  if (!status.ok()) return Fail(kFailed, status.message());
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Run(argc, argv); }
