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

// An open table. Calls of it may block: on the network if is_remote(), else for
// as long as the table works. RunAsync() below is how kernels make them.
//
// Thread-safe.
class TableResource : public tensorflow::ResourceBase {
 public:
  // Opens the cluster, which is the one of `cluster_id` if that is open here,
  // and the table in it. Blocks for at most about `timeout_s`.
  static absl::Status Open(const std::string& cluster, uint64_t cluster_id,
                           const std::string& config, double timeout_s,
                           tensorflow::core::RefCountPtr<TableResource>* table);

  ~TableResource() override;

  // InvalidArgument if this handle was opened for another table than
  // (cluster, config) names.
  absl::Status Verify(const std::string& handle_name,
                      const std::string& cluster,
                      const std::string& config) const;

  const std::string& name() const { return name_; }
  int dim() const { return dim_; }
  bool is_remote() const { return is_remote_; }

  std::string DebugString() const override;

  // Keeps the shows and clicks of a training lookup for the push of its
  // gradient. Warns, once, if the 100th comes and nothing has been pushed.
  void NoteTrainingLookup(absl::Span<const int64_t> ids, const float* shows,
                          const float* clicks) const;

  // See ObservedIds::Find.
  bool FindObservations(absl::Span<const int64_t> ids,
                        std::vector<float>* shows,
                        std::vector<float>* clicks) const {
    return observed_ids_.Find(ids, shows, clicks);
  }

  // FailedPrecondition if an optimizer with a larger number has pushed. 0 is
  // the number of the only one.
  absl::Status CheckRule(int64_t rule) const;
  // Notes that the optimizer with this number has pushed.
  void NotePush(int64_t rule) const;

  // For the functions of cc/capi/tfswitch.h, while this lives.
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

  // Synchronised by themselves.
  mutable ObservedIds observed_ids_;
  mutable std::atomic<int64_t> num_unpushed_lookups_{0};
  mutable std::atomic<bool> has_pushed_{false};
  mutable std::atomic<int64_t> rule_{0};
};

// The table behind an input of the running op. InvalidArgument if the handle is
// of another kind of resource, NotFound if it is gone.
absl::Status LookupTable(tensorflow::OpKernelContext* context,
                         tensorflow::core::RefCountPtr<TableResource>* table,
                         int index = 0);

// InvalidArgument unless the table has the dim that a lookup was built for.
absl::Status CheckDim(const TableResource& table, int dim);

// InvalidArgument unless the attribute `name` has one entry for each table.
absl::Status CheckEntries(const char* name, size_t num_entries, int num_tables);

// Makes output `index` of shape ids.shape + [dim].
absl::Status AllocateEmbeddings(tensorflow::OpKernelContext* context, int index,
                                const tensorflow::Tensor& ids, int dim,
                                float** embeddings);

// The tables of an op of many.
//
// Not thread-safe.
class TableList {
 public:
  // Looks up inputs 0 to `num_tables` - 1; errors as of LookupTable.
  absl::Status Lookup(tensorflow::OpKernelContext* context, int num_tables);
  void Clear() { tables_.clear(); }

  size_t size() const { return tables_.size(); }
  const TableResource& operator[](size_t i) const { return *tables_[i]; }
  bool IsAnyRemote() const;

 private:
  std::vector<tensorflow::core::RefCountPtr<TableResource>> tables_;
};

// Runs `call`, which lets go of its tables before it returns, sets its status,
// and ends the op with `done`.
//
// A call on embedded tables runs at once, like other kernels, and may use the
// device's intra-op threads. One call at a time that waits for a network runs
// at once, too, because waking another thread takes as long as a small call;
// the others wait on threads of tfswitch, so that ops of many tables hold one
// of TensorFlow's threads and no more.
void RunAsync(tensorflow::OpKernelContext* context, bool is_remote,
              std::function<absl::Status()> call,
              tensorflow::AsyncOpKernel::DoneCallback done);

// The intra-op threads of the device that the op runs on.
Tfswitch_Threads DeviceThreads(tensorflow::OpKernelContext* context);

// Two inputs: shows and clicks of `num_ids` ids, each empty or with one number
// per id. InvalidArgument naming the input and the shape that came. The options
// point into the inputs.
absl::Status ObservationInputs(tensorflow::OpKernelContext* context,
                               const TableResource& table, int shows_index,
                               int clicks_index, int64_t num_ids,
                               Tfswitch_PushOptions* options);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_TABLE_RESOURCE_H_
