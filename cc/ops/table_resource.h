// A TensorFlow resource around one table of the C API, and the code that its
// kernels share.

#ifndef TFSWITCH_CC_OPS_TABLE_RESOURCE_H_
#define TFSWITCH_CC_OPS_TABLE_RESOURCE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/capi/tfswitch.h"
#include "cc/ops/observed_ids.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/lib/core/refcount.h"

namespace tfswitch {

// An open table. Calls may block: they wait for the network if is_remote(),
// else they do the table's work. Kernels make them with RunAsync() below.
//
// Thread-safe.
class TableResource : public tensorflow::ResourceBase {
 public:
  // Opens the cluster and the table in it. If the cluster `cluster_id` is open
  // in this process, uses that one. Blocks for about `timeout_s` at most.
  static absl::Status Open(const std::string& cluster, uint64_t cluster_id,
                           const std::string& config, double timeout_s,
                           tensorflow::core::RefCountPtr<TableResource>* table);

  ~TableResource() override;

  // InvalidArgument if this handle was opened for another cluster or config.
  absl::Status Verify(const std::string& handle_name,
                      const std::string& cluster,
                      const std::string& config) const;

  const std::string& name() const { return name_; }
  int dim() const { return dim_; }
  bool is_remote() const { return is_remote_; }

  std::string DebugString() const override;

  // Keeps the shows and clicks of a training lookup for the push of its
  // gradient. Logs one warning if there have been 100 lookups and no push.
  void NoteTrainingLookup(absl::Span<const int64_t> ids, const float* shows,
                          const float* clicks) const;

  // See ObservedIds::Find.
  bool FindObservations(absl::Span<const int64_t> ids,
                        std::vector<float>* shows,
                        std::vector<float>* clicks) const {
    return observed_ids_.Find(ids, shows, clicks);
  }

  // FailedPrecondition if another optimizer, with a larger number, has pushed
  // before. `rule` is this optimizer's number, or 0 if there is only one.
  absl::Status CheckRule(int64_t rule) const;
  // Records that the optimizer with this number has pushed.
  void NotePush(int64_t rule) const;

  // The table for the functions of cc/capi/tfswitch.h. Valid as long as this
  // object lives.
  Tfswitch_Table* get() const { return table_; }

 private:
  TableResource(const Tfswitch_Api* api, Tfswitch_Table* table,
                std::string cluster, std::string config);

  // Constant after construction.
  const Tfswitch_Api* const api_;
  Tfswitch_Table* const table_;
  const std::string cluster_;
  const std::string config_;
  const std::string name_;
  const int dim_;
  const bool is_remote_;

  // These have their own synchronisation.
  mutable ObservedIds observed_ids_;
  mutable std::atomic<int64_t> num_unpushed_lookups_{0};
  mutable std::atomic<bool> has_pushed_{false};
  mutable std::atomic<int64_t> rule_{0};
};

// Finds the table of an input of the running op. InvalidArgument if the handle
// is for another kind of resource, NotFound if the resource no longer exists.
absl::Status LookupTable(tensorflow::OpKernelContext* context,
                         tensorflow::core::RefCountPtr<TableResource>* table,
                         int index = 0);

// InvalidArgument if the table's dim is not the one for which a lookup was
// built.
absl::Status CheckDim(const TableResource& table, int dim);

// InvalidArgument unless the attribute `name` has one entry for each table.
absl::Status CheckEntries(const char* name, size_t num_entries, int num_tables);

// Allocates output `index` with shape ids.shape + [dim].
absl::Status AllocateEmbeddings(tensorflow::OpKernelContext* context, int index,
                                const tensorflow::Tensor& ids, int dim,
                                float** embeddings);

// The tables of an op on several tables.
//
// Not thread-safe.
class TableList {
 public:
  // Finds the tables of inputs 0 to `num_tables` - 1, with the errors of
  // LookupTable().
  absl::Status Lookup(tensorflow::OpKernelContext* context, int num_tables);
  void Clear() { tables_.clear(); }

  size_t size() const { return tables_.size(); }
  const TableResource& operator[](size_t i) const { return *tables_[i]; }
  bool IsAnyRemote() const;

 private:
  std::vector<tensorflow::core::RefCountPtr<TableResource>> tables_;
};

// Runs `call`, which must release its tables before it returns. Then sets the
// op's status to its result, and ends the op with `done`.
//
// Calls on embedded tables run on the calling thread, like other kernels, and
// may use the device's intra-op threads. So does one remote call at a time,
// because waking another thread takes as long as a small call. Other remote
// calls wait on threads of tfswitch, so that ops of many tables block only one
// of TensorFlow's threads.
void RunAsync(tensorflow::OpKernelContext* context, bool is_remote,
              std::function<absl::Status()> call,
              tensorflow::AsyncOpKernel::DoneCallback done);

// The intra-op threads of the op's device.
Tfswitch_Threads DeviceThreads(tensorflow::OpKernelContext* context);

// Reads two inputs, the shows and clicks of `num_ids` ids. Each is empty or has
// one number per id; else InvalidArgument, naming the input and its shape. The
// options point into the inputs.
absl::Status ObservationInputs(tensorflow::OpKernelContext* context,
                               const TableResource& table, int shows_index,
                               int clicks_index, int64_t num_ids,
                               Tfswitch_PushOptions* options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_TABLE_RESOURCE_H_
