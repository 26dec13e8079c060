// RunAsync() makes calls of embedded tables on the op's own thread. One remote
// call at a time may block such a thread, because that saves a switch of
// threads. All other remote calls use BlockingThreads, so that TensorFlow's
// threads stay free. Tables are released before done(), because code that waits
// for the op may next close the cluster.
//
// Open() closes its handle of the cluster immediately, because the table keeps
// the cluster open.

#include "cc/ops/table_resource.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cc/ops/core_calls.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfswitch {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::core::RefCountPtr;

}  // namespace

absl::Status TableResource::Open(const std::string& cluster,
                                 uint64_t cluster_id, const std::string& config,
                                 double timeout_s,
                                 RefCountPtr<TableResource>* table) {
  return CallCore([&](const Tfswitch_Api& api, char* error) {
    Tfswitch_Cluster* open_cluster = nullptr;
    int code = api.open_cluster(cluster.c_str(), timeout_s,
                                /*credentials=*/nullptr, cluster_id,
                                &open_cluster, error);
    if (code != 0) return code;
    Tfswitch_Table* open_table = nullptr;
    code = api.open_table(open_cluster, config.c_str(), &open_table, error);
    // The table keeps its cluster open.
    api.close_cluster(open_cluster);
    if (code != 0) return code;
    table->reset(new TableResource(&api, open_table, cluster, config));
    return 0;
  });
}

TableResource::TableResource(const Tfswitch_Api* api, Tfswitch_Table* table,
                             std::string cluster, std::string config)
    : api_(api),
      table_(table),
      cluster_(std::move(cluster)),
      config_(std::move(config)),
      name_(api->table_name(table)),
      dim_(api->table_dim(table)),
      is_remote_(api->table_is_remote(table) != 0) {}

TableResource::~TableResource() { api_->close_table(table_); }

absl::Status TableResource::Verify(const std::string& handle_name,
                                   const std::string& cluster,
                                   const std::string& config) const {
  if (cluster == cluster_ && config == config_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table handle '", handle_name, "' is open for ", config_,
                   " at '", cluster_, "', and was asked for ", config, " at '",
                   cluster, "'. Give each table its own `shared_name`."));
}

std::string TableResource::DebugString() const {
  return absl::StrCat("tfswitch table '", name_, "' (dim ", dim_, ") at '",
                      cluster_, "'");
}

void TableResource::NoteTrainingLookup(absl::Span<const int64_t> ids,
                                       const float* shows,
                                       const float* clicks) const {
  constexpr int64_t kMaxUnpushed = 100;
  if (!has_pushed_ && ++num_unpushed_lookups_ == kMaxUnpushed) {
    absl::FPrintF(
        stderr,
        "tfswitch: warning: table '%s' has had %d training lookups in a "
        "GradientTape, and no optimizer has applied a gradient, so that its "
        "rows do not learn. Pass all of `model.trainable_variables` to "
        "`optimizer.apply_gradients`, or the gradient of the layer's weight to "
        "`layer.apply_gradients`.\n",
        name_, kMaxUnpushed);
  }
  observed_ids_.Record(ids, shows, clicks);
}

absl::Status TableResource::CheckRule(int64_t rule) const {
  if (rule == 0 || rule >= rule_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("table '", name_,
                   "' learns by an optimizer that came after the one of this "
                   "function, whose state it no longer has. Train with the "
                   "last optimizer only, or give each model rows of its own"));
}

void TableResource::NotePush(int64_t rule) const {
  has_pushed_ = true;
  int64_t last = rule_;
  while (rule > last && !rule_.compare_exchange_weak(last, rule)) {
  }
}

absl::Status LookupTable(OpKernelContext* context,
                         RefCountPtr<TableResource>* table, int index) {
  const tensorflow::ResourceHandle& handle =
      tensorflow::HandleFromInput(context, index);
  absl::Status status = tensorflow::LookupResource(context, handle, table);
  if (!absl::IsNotFound(status)) return status;
  return absl::NotFoundError(absl::StrCat(
      "the table '", handle.name(),
      "' of this function is not open any more: "
      "its EmbeddingTable or layer was collected. Keep that object for as long "
      "as the function is called, as a tf.Variable has to be kept"));
}

absl::Status CheckDim(const TableResource& table, int dim) {
  if (table.dim() == dim) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table.name(), "' has dim ", table.dim(),
                   ", and the lookup was built for dim ", dim));
}

absl::Status CheckEntries(const char* name, size_t num_entries,
                          int num_tables) {
  if (num_entries == static_cast<size_t>(num_tables)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "` must have one entry for each of ", num_tables,
                   " tables, got ", num_entries));
}

absl::Status AllocateEmbeddings(OpKernelContext* context, int index,
                                const Tensor& ids, int dim,
                                float** embeddings) {
  tensorflow::TensorShape shape = ids.shape();
  TF_RETURN_IF_ERROR(shape.AddDimWithStatus(dim));
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(index, shape, &output));
  *embeddings = output->flat<float>().data();
  return absl::OkStatus();
}

absl::Status TableList::Lookup(OpKernelContext* context, int num_tables) {
  tables_.resize(num_tables);
  for (int i = 0; i < num_tables; ++i) {
    TF_RETURN_IF_ERROR(LookupTable(context, &tables_[i], i));
  }
  return absl::OkStatus();
}

bool TableList::IsAnyRemote() const {
  return std::any_of(tables_.begin(), tables_.end(),
                     [](const RefCountPtr<TableResource>& table) {
                       return table->is_remote();
                     });
}

void RunAsync(OpKernelContext* context, bool is_remote,
              std::function<absl::Status()> call,
              tensorflow::AsyncOpKernel::DoneCallback done) {
  static std::atomic<bool> is_one_waiting{false};
  if (is_remote && is_one_waiting.exchange(true)) {
    return RunApart(context, std::move(call), std::move(done));
  }
  const absl::Status status = call();
  if (is_remote) is_one_waiting = false;  // Another op may block a thread now.
  OP_REQUIRES_OK_ASYNC(context, status, done);
  done();
}

Tfswitch_Threads DeviceThreads(OpKernelContext* context) {
  const auto* device = context->device()->tensorflow_cpu_worker_threads();
  Tfswitch_Threads threads;
  // The calling thread works too.
  threads.num_threads = device->num_threads - 1;
  threads.context = device->workers;
  threads.schedule = [](void* workers, void (*task)(void*),
                        void* task_context) {
    static_cast<tensorflow::thread::ThreadPool*>(workers)->Schedule(
        [task, task_context] { task(task_context); });
  };
  return threads;
}

absl::Status ObservationInputs(OpKernelContext* context,
                               const TableResource& table, int shows_index,
                               int clicks_index, int64_t num_ids,
                               Tfswitch_PushOptions* options) {
  const auto read = [&](int input_index, const char* name,
                        const float** values) {
    const Tensor& input = context->input(input_index);
    *values = nullptr;
    if (input.NumElements() == 0) return absl::OkStatus();
    if (input.NumElements() != num_ids) {
      return absl::InvalidArgumentError(absl::StrCat(
          "table '", table.name(), "': `", name,
          "` must be empty or have one "
          "number for each of ",
          num_ids, " ids. Received: shape ", input.shape().DebugString()));
    }
    *values = input.flat<float>().data();
    return absl::OkStatus();
  };
  TF_RETURN_IF_ERROR(read(shows_index, "shows", &options->shows));
  return read(clicks_index, "clicks", &options->clicks);
}

}  // namespace tfswitch
