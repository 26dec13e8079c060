// A Call object is gRPC's tag of one event at a time: first of the arrival of a
// call, then of the end of its answer. Then it is idle and is used for another
// call. All work between the events is done by the thread of its queue, so the
// calls and buffers of a queue need no lock. Buffers are kept from call to
// call; Trim() frees unusually large ones.
//
// A pull's answer has a length that is known before its rows. So its header is
// written first, and then the shard writes the rows directly into the memory
// that gRPC sends; 16-bit rows are rounded into it. ReserveAnswer() counts this
// memory before it is allocated, until the answer has been sent. If there is no
// memory, only this call fails.

#include "cc/rpc/server/data_plane.h"

#include <cstring>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/rpc/byte_buffers.h"
#include "cc/rpc/deadlines.h"
#include "cc/rpc/server/call_rules.h"
#include "cc/rpc/server/server_times.h"
#include "cc/rpc/status_conversion.h"
#include "cc/shard/row_work.h"
#include "cc/wire/codec.h"

namespace tfswitch {
namespace {

// How many idle calls a queue keeps.
constexpr size_t kMaxIdle = 256;
// The most unread answers of a queue. Each takes some 20 KiB besides its rows.
constexpr size_t kMaxUnread = 8192;
// When the memory for answers is used up, answers that peers have not read for
// this long are cancelled.
constexpr absl::Duration kTimeToRead = absl::Seconds(10);

RowsVersion VersionOf(const EmbeddingTable& table) {
  return {
      table.generation(),
      static_cast<uint64_t>(table.counters().Sum(TableCounter::num_pushes))};
}

size_t VersionBytes(const PullRequest& pull) {
  return pull.mark_missing ? kRowsVersionBytes : 0;
}

}  // namespace

// How calls of a method are received from gRPC, and answered.
struct DataPlane::Method {
  void (Service::*ask)(grpc::ServerContext*, grpc::ByteBuffer*,
                       grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>*,
                       grpc::CompletionQueue*, grpc::ServerCompletionQueue*,
                       void*);
  absl::Status (DataPlane::*answer)(Call*, Queue*);
  bool is_many;  // A message of several parts.
  const MethodRule& rule;
};

// One call, from its request to the end of its answer; then the object is used
// for another call. Only the thread of its queue uses it.
class DataPlane::Call {
 public:
  const Method* method = nullptr;
  // The answer is being sent; the next event is its end.
  bool answered = false;
  absl::Time answered_at;
  // The call's place in Queue::unread, once it is answered.
  std::list<Call*>::iterator unread;
  bool inside = false;          // The gate counts it until the answer is sent.
  uint64_t reserved_bytes = 0;  // For its answer.
  Caller caller;                // Until the answer was sent.
  grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  // Made for each call.
  std::optional<grpc::ServerContext> context;
  std::optional<grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>> writer;
};

struct DataPlane::Queue {
  std::unique_ptr<grpc::ServerCompletionQueue> completions;
  std::thread thread;

  // Used by the queue's thread only.
  std::vector<std::unique_ptr<Call>> idle;
  std::list<Call*> unread;  // Answered but not sent yet, the oldest first.
  std::vector<absl::string_view> pieces;
  DecodeScratch scratch;
  AssignRequest assign;
  PartScratch part_scratch;
  std::vector<PullRequest> pulls;
  std::vector<PushRequest> pushes;

  // Call it after each call. Clears the values, because they point into a
  // request that is freed now, and frees unusually large buffers.
  void Trim() {
    assign = AssignRequest();
    pulls.clear();
    pushes.clear();
    scratch.Trim();
    part_scratch.Trim();
  }

  // Guards `open`, because gRPC forbids new operations on a queue that is shut
  // down.
  Mutex mutex;
  bool open ABSL_GUARDED_BY(mutex) = true;
  bool asks ABSL_GUARDED_BY(mutex) = true;  // Stays false once it is false.

  void AskForCall(Service* service, const Method& method) {
    if (idle.empty()) idle.push_back(std::make_unique<Call>());
    Call& call = *idle.back();
    call.method = &method;
    call.context.emplace();
    call.writer.emplace(&*call.context);
    grpc::ServerCompletionQueue* const queue = completions.get();
    MutexLock lock(&mutex);
    if (!asks) return;
    Call* const tag = idle.back().release();  // The event owns it now.
    idle.pop_back();
    (service->*method.ask)(&*call.context, &call.request, &*call.writer, queue,
                           queue, tag);
  }

  // Sends the answer to a call. The event of the answer's end then owns the
  // call object. If the queue was shut down meanwhile, the call is cancelled,
  // and this returns false.
  bool Finish(Call* call, const absl::Status& status) {
    MutexLock lock(&mutex);
    if (!open) return false;
    if (status.ok()) {
      call->writer->Finish(call->response, grpc::Status::OK, call);
    } else {
      call->writer->FinishWithError(
          ToGrpcStatus(call->caller.WithoutNames(status)), call);
    }
    return true;
  }

  // Keeps the object of an ended call for a later call.
  void Recycle(std::unique_ptr<Call> call) {
    call->answered = false;
    call->caller = Caller();
    call->request.Clear();
    call->response.Clear();
    call->writer.reset();
    call->context.reset();
    if (idle.size() < kMaxIdle) idle.push_back(std::move(call));
  }

  // Cancels calls with unread answers, the oldest first: those beyond the limit
  // of the queue and, if `bytes` have to be freed, those older than
  // kTimeToRead.
  void CancelUnread(uint64_t bytes) {
    const absl::Time slow = SteadyNow() - kTimeToRead;
    uint64_t freed = 0;
    for (auto it = unread.begin(); it != unread.end();) {
      Call* const call = *it;
      const bool is_one_too_many = unread.size() > kMaxUnread;
      if (!is_one_too_many && (freed >= bytes || call->answered_at > slow)) {
        break;
      }
      freed += call->reserved_bytes;
      it = unread.erase(it);
      call->unread = unread.end();
      call->context->TryCancel();
    }
  }
};

DataPlane::DataPlane(int num_threads, uint64_t max_message_bytes,
                     uint64_t max_answer_bytes, Service* service,
                     std::shared_ptr<Shard> shard,
                     const CallContext& call_context,
                     const LentThreads* helpers, grpc::ServerBuilder* builder)
    : max_message_bytes_(max_message_bytes),
      max_answer_bytes_(max_answer_bytes),
      service_(service),
      shard_(std::move(shard)),
      call_context_(call_context),
      helpers_(helpers) {
  for (int i = 0; i < num_threads; ++i) {
    queues_.push_back(std::make_unique<Queue>());
    queues_.back()->completions = builder->AddCompletionQueue();
  }
}

DataPlane::~DataPlane() = default;

void DataPlane::Start() {
  static const Method kMethods[] = {
      {&Service::RequestPull, &DataPlane::AnswerPull, false,
       RuleFor<v1::PullRequest>()},
      {&Service::RequestPush, &DataPlane::AnswerPush, false,
       RuleFor<v1::PushRequest>()},
      {&Service::RequestPullMany, &DataPlane::AnswerPull, true,
       RuleFor<v1::PullManyRequest>()},
      {&Service::RequestPushMany, &DataPlane::AnswerPush, true,
       RuleFor<v1::PushManyRequest>()},
      {&Service::RequestAssign, &DataPlane::AnswerAssign, false,
       RuleFor<v1::AssignRequest>()},
  };
  for (const std::unique_ptr<Queue>& queue : queues_) {
    for (const Method& method : kMethods) {
      for (int i = 0; i < kCallsPerQueue; ++i) {
        queue->AskForCall(service_, method);
      }
    }
    queue->thread = std::thread(&DataPlane::Run, this, queue.get());
  }
}

void DataPlane::StopAsking() {
  for (const std::unique_ptr<Queue>& queue : queues_) {
    MutexLock lock(&queue->mutex);
    queue->asks = false;
  }
}

void DataPlane::Shutdown() {
  for (const std::unique_ptr<Queue>& queue : queues_) {
    {
      MutexLock lock(&queue->mutex);
      queue->open = false;
    }
    queue->completions->Shutdown();
    if (queue->thread.joinable()) {
      queue->thread.join();
    } else {
      // The queue's thread was never started, so this thread reads the events:
      // a queue must be empty before it is deleted.
      void* tag;
      bool ok;
      while (queue->completions->Next(&tag, &ok)) {
      }
    }
  }
}

void DataPlane::Run(Queue* queue) {
  void* tag;
  bool ok;
  while (queue->completions->Next(&tag, &ok)) {
    std::unique_ptr<Call> owned(static_cast<Call*>(tag));
    Call* const call = owned.get();
    if (call->answered) {
      if (call->inside) call_context_.gate->Leave();
      answer_bytes_ -= std::exchange(call->reserved_bytes, 0);
      if (call->unread != queue->unread.end()) {
        queue->unread.erase(call->unread);
      }
      queue->Recycle(std::move(owned));
      continue;
    }
    // The server is shutting down, and no call has arrived for this object.
    if (!ok) continue;
    // Asks for the next call now, so that it need not wait for the present one.
    queue->AskForCall(service_, *call->method);
    const ServerTimes times(*call->context);
    absl::Status status = call_context_.gate->Enter();
    call->inside = status.ok();
    if (status.ok()) {
      try {
        status = Answer(call, queue);
      } catch (const std::bad_alloc&) {
        status = absl::ResourceExhaustedError("the server is out of memory");
      }
    }
    call_context_.access->NoteEnd(*call->context, call->caller,
                                  call->method->rule, {},
                                  /*path=*/"", status);
    call_context_.access->calls().RecordBytes(call->method->rule.method,
                                              call->request.Length(),
                                              call->response.Length());
    call->answered = true;
    call->answered_at = SteadyNow();
    times.Tell(&*call->context);
    if (!queue->Finish(call, status)) {
      if (call->inside) call_context_.gate->Leave();
      continue;
    }
    // Its event comes to this thread, later.
    call->unread = queue->unread.insert(queue->unread.end(), owned.release());
    queue->CancelUnread(/*bytes=*/0);
    queue->Trim();
  }
}

absl::Status DataPlane::Answer(Call* call, Queue* queue) {
  // After the deadline of a call the client no longer waits for the answer.
  if (TimeLeft(*call->context) < absl::ZeroDuration()) {
    return absl::DeadlineExceededError(
        "the deadline passed before the server came to the call");
  }
  TFSWITCH_RETURN_IF_ERROR(call_context_.access->Admit(
      &*call->context, call->method->rule, &call->caller));
  TFSWITCH_RETURN_IF_ERROR(
      call->caller.AddRequest(&*call->context, call->request.Length()));
  ListPieces(&call->request, &queue->pieces);
  return (this->*call->method->answer)(call, queue);
}

absl::StatusOr<std::shared_ptr<EmbeddingTable>> DataPlane::FindFor(
    const Call& call, const TableRef& table, bool changes) const {
  TFSWITCH_RETURN_IF_ERROR(call.caller.CheckTable(table.name));
  if (changes) {
    TFSWITCH_RETURN_IF_ERROR(
        call.caller.CheckRole(v1::ROLE_TRAIN, "a call that changes rows"));
  }
  return shard_->FindTable(table);
}

absl::Status DataPlane::ReserveAnswer(Call* call, Queue* queue, uint64_t bytes,
                                      uint64_t scratch) {
  TFSWITCH_RETURN_IF_ERROR(call->caller.AddAnswer(&*call->context, bytes));
  call->reserved_bytes = bytes + scratch;
  const uint64_t all = answer_bytes_ += call->reserved_bytes;
  if (all <= max_answer_bytes_) return absl::OkStatus();
  queue->CancelUnread(all - max_answer_bytes_);
  return absl::ResourceExhaustedError(absl::StrCat(
      "with this one of ", bytes,
      " bytes, answers that peers have not read "
      "take ",
      all, " bytes, over the limit of ", max_answer_bytes_,
      "; pull fewer keys at a time or start the server with a larger "
      "--max_buffer_bytes"));
}

absl::Status DataPlane::AnswerPull(Call* call, Queue* queue) {
  const bool is_many = call->method->is_many;
  if (is_many) {
    TFSWITCH_RETURN_IF_ERROR(ReadPullManyRequest(
        queue->pieces, &queue->part_scratch, &queue->pulls));
  } else {
    TFSWITCH_RETURN_IF_ERROR(ReadPullRequest(queue->pieces, &queue->scratch,
                                             &queue->pulls.emplace_back()));
  }
  const std::vector<PullRequest>& pulls = queue->pulls;
  std::vector<std::shared_ptr<EmbeddingTable>> tables;
  tables.reserve(pulls.size());
  std::vector<Insertion> insertions;
  uint64_t size = 0;
  uint64_t scratch = 0;  // For the floats of 16-bit rows.
  for (const PullRequest& pull : pulls) {
    TFSWITCH_ASSIGN_OR_RETURN(
        auto table, FindFor(*call, {pull.table, pull.table_incarnation},
                            /*changes=*/pull.insert_missing));
    if (pull.insert_missing) insertions.push_back({table.get(), pull.keys});
    const uint64_t num_floats = pull.keys.size() * table->dim();
    const uint64_t answer =
        PullResponseBytes(num_floats, pull.wire_dtype) + VersionBytes(pull);
    if (pull.wire_dtype != FloatType::kFloat32) {
      scratch += num_floats * sizeof(float);
    }
    size += is_many ? PartBytes(answer) : answer;
    tables.push_back(std::move(table));
  }
  if (size > max_message_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "table '", pulls[0].table, "': the answer to a pull of ",
        pulls[0].keys.size(), " keys",
        pulls.size() > 1
            ? absl::StrCat(", with those of ", pulls.size(), " pulls,")
            : "",
        " is a message of ", size, " bytes, over the limit of ",
        max_message_bytes_,
        "; pull fewer keys per call or start the server with a larger "
        "--max_message_bytes"));
  }
  TFSWITCH_RETURN_IF_ERROR(ReserveAnswer(call, queue, size, scratch));
  TFSWITCH_RETURN_IF_ERROR(CheckRowQuota(call->caller, *shard_, insertions));
  // Each part has a slice of its own, so that the floats of each part are
  // aligned.
  std::vector<grpc::Slice> slices(pulls.size());
  TFSWITCH_RETURN_IF_ERROR(RunEach(helpers_, pulls.size(), [&](size_t i) {
    return AnswerPart(*call, pulls[i], *tables[i], is_many, &slices[i]);
  }));
  call->response = grpc::ByteBuffer(slices.data(), slices.size());
  call->reserved_bytes -= scratch;
  answer_bytes_ -= scratch;
  return absl::OkStatus();
}

absl::Status DataPlane::AnswerPart(const Call& call, const PullRequest& pull,
                                   EmbeddingTable& table, bool has_header,
                                   grpc::Slice* answer) const {
  // A caller of role read must not change the server's day.
  if (call.caller.May(v1::ROLE_TRAIN)) {
    TFSWITCH_RETURN_IF_ERROR(NoteDay(table, pull.day));
  }
  const size_t num_floats = pull.keys.size() * table.dim();
  const FloatType type = pull.wire_dtype;
  const uint64_t bytes = WireBytes(num_floats, type);
  char header[kMaxPartHeader + kMaxPullResponseHeader];
  size_t header_bytes =
      has_header ? WritePartHeader(
                       PullResponseBytes(num_floats, type) + VersionBytes(pull),
                       header)
                 : 0;
  header_bytes +=
      WritePullResponseHeader(num_floats, header + header_bytes, type);
  const RowsVersion version = VersionOf(table);
  OutgoingMessage message(header_bytes + bytes + VersionBytes(pull),
                          header_bytes);
  const bool is_float32 = type == FloatType::kFloat32;
  const std::unique_ptr<float[]> rounded(
      is_float32 ? nullptr : new (std::nothrow) float[num_floats]);
  if (message.data() == nullptr || (!is_float32 && rounded == nullptr)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("table '", pull.table, "': no memory for an answer of ",
                     bytes, " bytes"));
  }
  std::memcpy(message.data(), header, header_bytes);
  char* const to = message.data() + header_bytes;
  const absl::Span<float> rows = absl::MakeSpan(
      is_float32 ? reinterpret_cast<float*>(to) : rounded.get(), num_floats);
  TFSWITCH_RETURN_IF_ERROR(
      shard_->Pull(table, pull.keys, pull.if_missing(), rows, helpers_));
  if (!is_float32) WriteHalfRows(rows, type, to);
  if (pull.mark_missing) WriteRowsVersion(version, to + bytes);
  *answer = std::move(message).ToSlice();
  return absl::OkStatus();
}

absl::Status DataPlane::AnswerPush(Call* call, Queue* queue) {
  const bool is_many = call->method->is_many;
  if (is_many) {
    TFSWITCH_RETURN_IF_ERROR(ReadPushManyRequest(
        queue->pieces, &queue->part_scratch, &queue->pushes));
  } else {
    TFSWITCH_RETURN_IF_ERROR(ReadPushRequest(queue->pieces, &queue->scratch,
                                             &queue->pushes.emplace_back()));
  }
  std::vector<TablePush> pushes;
  pushes.reserve(queue->pushes.size());
  std::vector<Insertion> insertions;
  const uint64_t caller = call->caller.CallerId(*call->context);
  for (PushRequest& request : queue->pushes) {
    request.id.caller = caller;
    TFSWITCH_ASSIGN_OR_RETURN(
        auto table, FindFor(*call, {request.table, request.table_incarnation},
                            /*changes=*/true));
    // The policy decides, not the caller.
    if (request.insert_missing || !table->config().admission.is_always()) {
      insertions.push_back({table.get(), request.keys});
    }
    pushes.push_back({std::move(table), &request});
  }
  TFSWITCH_RETURN_IF_ERROR(CheckRowQuota(call->caller, *shard_, insertions));
  std::vector<WriteResult> results(pushes.size());
  TFSWITCH_RETURN_IF_ERROR(
      shard_->PushMany(pushes, absl::MakeSpan(results), helpers_));
  std::string response;
  for (size_t i = 0; i < results.size(); ++i) {
    results[i].version = VersionOf(*pushes[i].table);
    const std::string part = EncodeWriteResponse(results[i]);
    if (is_many) {
      char header[kMaxPartHeader];
      response.append(header, WritePartHeader(part.size(), header));
    }
    response.append(part);
  }
  call->response = ToByteBuffer(response);
  return absl::OkStatus();
}

absl::Status DataPlane::AnswerAssign(Call* call, Queue* queue) {
  AssignRequest& assign = queue->assign;
  TFSWITCH_RETURN_IF_ERROR(
      ReadAssignRequest(queue->pieces, &queue->scratch, &assign));
  assign.id.caller = call->caller.CallerId(*call->context);
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto table, FindFor(*call, {assign.table, assign.table_incarnation},
                                /*changes=*/true));
  TFSWITCH_RETURN_IF_ERROR(
      CheckRowQuota(call->caller, *shard_, {{table.get(), assign.keys}}));
  TFSWITCH_ASSIGN_OR_RETURN(const WriteResult written,
                            shard_->AssignOnce(assign));
  call->response = ToByteBuffer(EncodeWriteResponse(written));
  return absl::OkStatus();
}

}  // namespace tfswitch
