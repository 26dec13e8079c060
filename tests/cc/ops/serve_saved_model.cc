// A C++ server in small: serves a SavedModel with tfswitch ops, knowing nothing
// of tfswitch but the path of the op library.
//
//   serve_saved_model OP_LIBRARY SAVED_MODEL ID...
//
// Feeds the ids to the input "ids" of the signature "serving_default" and
// prints the floats of its output "embeddings", one per line.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/c/c_api.h"
#include "tensorflow/cc/saved_model/loader.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/public/session.h"
#include "tensorflow/core/public/session_options.h"

namespace {

int Fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  return 1;
}

int Serve(const char* op_library, const char* saved_model,
          const std::vector<int64_t>& ids) {
  TF_Status* load_status = TF_NewStatus();
  TF_LoadLibrary(op_library, load_status);
  if (TF_GetCode(load_status) != TF_OK) return Fail(TF_Message(load_status));
  TF_DeleteStatus(load_status);

  tensorflow::SavedModelBundle bundle;
  absl::Status status = tensorflow::LoadSavedModel(
      tensorflow::SessionOptions(), tensorflow::RunOptions(), saved_model,
      {"serve"}, &bundle);
  if (!status.ok()) return Fail(status.ToString());

  const auto& signature = bundle.GetSignatures().at("serving_default");
  tensorflow::Tensor input(tensorflow::DT_INT64,
                           {static_cast<int64_t>(ids.size())});
  for (size_t i = 0; i < ids.size(); ++i) input.flat<int64_t>()(i) = ids[i];
  // Twice: the first run opens the table, the second finds it open.
  std::vector<tensorflow::Tensor> outputs;
  for (int run = 0; run < 2; ++run) {
    status = bundle.GetSession()->Run(
        {{signature.inputs().at("ids").name(), input}},
        {signature.outputs().at("embeddings").name()}, {}, &outputs);
    if (!status.ok()) return Fail(status.ToString());
  }
  const auto embeddings = outputs[0].flat<float>();
  for (int64_t i = 0; i < embeddings.size(); ++i) {
    std::printf("%.9g\n", embeddings(i));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    return Fail("usage: serve_saved_model OP_LIBRARY SAVED_MODEL ID...");
  }
  std::vector<int64_t> ids;
  for (int i = 3; i < argc; ++i) {
    ids.push_back(std::strtoll(argv[i], nullptr, 10));
  }
  return Serve(argv[1], argv[2], ids);
}
