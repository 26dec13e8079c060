// Reads the inputs of a model from files.

#ifndef EXAMPLES_SERVING_CC_RECORD_FILE_H_
#define EXAMPLES_SERVING_CC_RECORD_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/predictor/values.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace tfswitch {

// A file of records, each of which holds one row of every input of a signature.
// What else it holds is passed over.
//
//   .tfrecord, .tfrecord.gz   tf.train.Example, features named as the inputs
//   .csv                      a header that names the inputs; several values of
//                             a cell are separated by `separator`, unless the
//                             input takes one value per row. Cells may be
//                             quoted; a quoted line break is not understood.
//
// Errors name the file and the record, counted from 1; a CSV file's first
// record is its second line.
//
// Not thread-safe.
class RecordFile {
 public:
  // InvalidArgument for a file of another kind, a CSV file without an input's
  // column, or an input that does not hold one row per record.
  static absl::StatusOr<std::unique_ptr<RecordFile>> Open(
      const std::string& path, const tensorflow::SignatureDef& signature,
      char separator);

  virtual ~RecordFile() = default;

  // Reads the next record's rows: shape and data without the first dimension.
  // OutOfRange at the end of the file.
  virtual absl::Status Read(NamedValues* rows) = 0;

 protected:
  RecordFile(const std::string& path, const tensorflow::SignatureDef& signature)
      : path_(path),
        inputs_(signature.inputs().begin(), signature.inputs().end()) {}

  // An error that begins with the file and the record that is being read.
  absl::Status ErrorHere(const std::string& message) const;

  const std::string path_;
  const std::map<std::string, tensorflow::TensorInfo> inputs_;
  int64_t record_ = 0;
};

// The shape of a row of `count` values. An input may have one dimension that is
// not known besides the first: it follows from the number of values.
absl::StatusOr<std::vector<int64_t>> RowShape(
    const tensorflow::TensorInfo& info, int64_t count);

}  // namespace tfswitch

#endif  // EXAMPLES_SERVING_CC_RECORD_FILE_H_
