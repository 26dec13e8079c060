// Writes what a model predicts for each record of a file.
//
//   predict_file --model=/models/ranking --input=clicks.csv --output=scores.csv
//
// The output is CSV: a column per output of the model, a line per record, in
// the order of the input. Several values of a cell are separated.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "record_file.h"
#include "tfswitch/predictor.h"

namespace example {
using tfswitch::NamedValues;
using tfswitch::Predictor;
using tfswitch::Result;
using tfswitch::Status;
using tfswitch::StatusCode;
using tfswitch::Values;

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

// Moves a row to a batch, unless its shape differs from the others.
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

std::string Cell(int64_t value) { return std::to_string(value); }
std::string Cell(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}
std::string Cell(const std::string& value) {
  if (value.find_first_of(",\"\r\n") == value.npos) return value;
  std::string quoted = "\"";
  for (const char c : value) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

// A cell with the values of one row.
std::string Cell(const Values& values, int64_t row, char separator) {
  return std::visit(
      [&](const auto& data) {
        const size_t width = data.size() / static_cast<size_t>(values.shape[0]);
        std::vector<std::string> cells;
        for (size_t i = 0; i < width; ++i) {
          cells.push_back(Cell(data[static_cast<size_t>(row) * width + i]));
        }
        return Join(cells, std::string(1, separator));
      },
      values.data);
}

// Predicts a batch of `count` rows and writes a line for each.
Status PredictBatch(const Job& job, const Predictor& predictor, int64_t count,
                    NamedValues* batch, std::ostream& lines) {
  for (auto& [name, values] : *batch) {
    values.shape.insert(values.shape.begin(), count);
  }
  const Result<NamedValues> predicted = predictor.Predict(*batch, job.outputs);
  if (!predicted.ok()) return predicted.status();
  std::vector<const Values*> columns;
  for (const std::string& name : job.outputs) {
    const Values& values = predicted->at(name);
    if (values.shape.empty() || values.shape[0] != count) {
      std::vector<std::string> dims;
      for (const int64_t dim : values.shape)
        dims.push_back(std::to_string(dim));
      return Status(StatusCode::kFailedPrecondition,
                    "output '" + name +
                        "' does not have a row per record: its shape is "
                        "[" +
                        Join(dims, ",") + "] for " + std::to_string(count) +
                        " records; choose others with --output_name");
    }
    columns.push_back(&values);
  }
  for (int64_t row = 0; row < count; ++row) {
    for (size_t i = 0; i < columns.size(); ++i) {
      lines << (i > 0 ? "," : "") << Cell(*columns[i], row, job.separator);
    }
    lines << '\n';
  }
  return Status();
}

Status PredictAll(const Job& job, const Predictor& predictor, RecordFile* file,
                  std::ostream& lines) {
  lines << Join(job.outputs, ",") << '\n';
  NamedValues batch;
  int64_t count = 0;
  int64_t done = 0;
  bool ended = false;
  while (!ended) {
    NamedValues rows;
    Status status = file->Read(&rows);
    ended = status.code() == StatusCode::kOutOfRange;
    if (!status.ok() && !ended) return status;
    // A batch ends early if the next row has another shape.
    const bool added =
        !ended && count < job.batch_size && Append(&rows, &batch);
    if (added) {
      ++count;
      continue;
    }
    if (count > 0) {
      status = PredictBatch(job, predictor, count, &batch, lines);
      if (!status.ok()) {
        return Status(status.code(), "'" + job.input + "', records " +
                                         std::to_string(done + 1) + " to " +
                                         std::to_string(done + count) + ": " +
                                         status.message());
      }
    }
    done += count;
    batch = std::move(rows);
    count = 1;
  }
  if (!lines.flush()) {
    return Status(StatusCode::kDataLoss,
                  "cannot write " + job.output + "; is the disk full?");
  }
  return Status();
}

// Runs the job. The output file appears when it is complete.
Status PredictFile(Job job, const Predictor& predictor) {
  const std::shared_ptr<const tfswitch::ModelVersion> model =
      predictor.current();
  const Result<const tfswitch::Signature*> signature = model->FindSignature("");
  if (!signature.ok()) return signature.status();
  const auto& known = (*signature)->outputs;
  if (job.outputs.empty()) {
    for (const auto& entry : known) job.outputs.push_back(entry.first);
  }
  for (const std::string& name : job.outputs) {
    if (known.count(name) == 0) {
      return Status(
          StatusCode::kInvalidArgument,
          "no output '" + name + "'; the outputs are " + Describe(known));
    }
  }
  const Result<std::unique_ptr<RecordFile>> file =
      RecordFile::Open(job.input, **signature, job.separator);
  if (!file.ok()) return file.status();
  if (job.output.empty()) {
    return PredictAll(job, predictor, file->get(), std::cout);
  }
  const std::string partial =
      job.output + ".partial-" + std::to_string(getpid());
  Status status;
  {
    std::ofstream lines(partial);
    status = PredictAll(job, predictor, file->get(), lines);
  }
  if (status.ok() && std::rename(partial.c_str(), job.output.c_str()) != 0) {
    status =
        Status(StatusCode::kUnavailable, "cannot write '" + job.output + "'");
  }
  if (!status.ok()) std::remove(partial.c_str());
  return status;
}

int Fail(int code, const std::string& message) {
  std::fprintf(stderr, "predict_file: %s\n", message.c_str());
  return code;
}

constexpr char kHelp[] = R"(predict_file --model=FOLDER --input=FILE [flags]
  --model        a SavedModel, or a folder of versions: 1/, 2/, ...
  --input        a .tfrecord, .tfrecord.gz (tf.train.Example) or .csv file
  --output       a CSV file; empty, the default: stdout
  --output_name  outputs of the model, with commas; empty, the default: all
  --batch_size   records that are run together; default: 256
  --separator    between several values of a CSV cell; default: |
  --op_library   library with the model's own ops; empty: none; default: that
                 of tfswitch
  --version      of the model; -1, the default: the newest
  --signature    of the model; default: serving_default
  --tags         of the graph in the SavedModel, with commas; default: serve
)";

int Run(int argc, char** argv) {
  std::map<std::string, std::string> flags = {
      {"--model", ""},
      {"--input", ""},
      {"--output", ""},
      {"--output_name", ""},
      {"--batch_size", "256"},
      {"--separator", "|"},
      {"--version", "-1"},
      {"--op_library", tfswitch::OpLibraryPath()},
      {"--signature", "serving_default"},
      {"--tags", "serve"}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const auto flag = flags.find(argument.substr(0, equals));
    if (argument == "--help") {
      std::fputs(kHelp, stdout);
      return 0;
    }
    if (flag == flags.end() || equals == argument.npos) {
      return Fail(kBadFlag, "unknown argument '" + argument + "'; see --help");
    }
    flag->second = argument.substr(equals + 1);
  }
  if (flags["--model"].empty() || flags["--input"].empty()) {
    return Fail(kBadFlag, "give --model and --input; see --help");
  }
  Job job;
  tfswitch::PredictorOptions options;
  if (!ParseInteger(flags["--version"], &options.version)) {
    return Fail(kBadFlag, "--version must be an integer");
  }
  if (!ParseInteger(flags["--batch_size"], &job.batch_size) ||
      job.batch_size < 1 || flags["--separator"].size() != 1) {
    return Fail(kBadFlag,
                "--batch_size must be positive, and --separator one character");
  }
  job.input = flags["--input"];
  job.output = flags["--output"];
  job.separator = flags["--separator"][0];
  if (!flags["--output_name"].empty()) {
    job.outputs = Split(flags["--output_name"], ',');
  }
  options.model_dir = flags["--model"];
  options.op_library = flags["--op_library"];
  options.model.signature = flags["--signature"];
  options.model.tags = Split(flags["--tags"], ',');
  // The program serves the model and its rows as they are, without updates.
  options.poll_interval = tfswitch::Seconds::zero();
  options.watch_rows_interval = tfswitch::Seconds::zero();

  const auto predictor = Predictor::Load(options);
  if (!predictor.ok()) return Fail(kFailed, predictor.status().message());
  const Status status = PredictFile(job, **predictor);
  if (!status.ok()) return Fail(kFailed, status.message());
  return 0;
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) { return example::Run(argc, argv); }
