// The only header that crosses from the core library into code compiled against
// TensorFlow or Python. Conventions:
//
//   - Only C types cross. TensorFlow carries its own Abseil and protobuf, and a
//     type shared by both sides would have two definitions.
//   - libtfswitch_core.so exports one symbol, Tfswitch_GetApi. Open the library
//     with OpenCore() of cc/capi/core_loader.h, never by linking to it. A
//     program that has loaded libtfswitch_ops.so finds the symbol there too.
//   - Functions that can fail return 0 or an absl::StatusCode value, and write
//     to `error` a message that ends with NUL, cut to TFSWITCH_ERROR_SIZE.
//     They never throw.
//   - The caller owns every buffer it passes; nothing of it is retained after
//     the call returns. Strings that the core returns are freed with
//     free_string.
//   - Every function may be called from any thread, and none needs the GIL.

#ifndef TFSWITCH_CC_CAPI_TFSWITCH_H_
#define TFSWITCH_CC_CAPI_TFSWITCH_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Grows when a function changes, goes, or is added, which is at the end: who
// has been compiled with it would look for it behind the struct of an older
// core.
#define TFSWITCH_API_VERSION 10
#define TFSWITCH_ERROR_SIZE 2048
// Tables of one call of pull_many or push_unique_many.
#define TFSWITCH_MAX_PARTS 256

// A worker's item: lost (or finished); its own; the same, and advanced by a
// step that has not ended.
#define TFSWITCH_WORK_ITEM_LOST 0
#define TFSWITCH_WORK_ITEM_OWN 1
#define TFSWITCH_WORK_ITEM_IN_STEP 2

typedef struct Tfswitch_Cluster Tfswitch_Cluster;
typedef struct Tfswitch_Table Tfswitch_Table;
typedef struct Tfswitch_Server Tfswitch_Server;
typedef struct Tfswitch_ServedModel Tfswitch_ServedModel;
typedef struct Tfswitch_ServedRows Tfswitch_ServedRows;

// Receives a run of rows; the pointers are valid during the call. `slots` is
// NULL if no slots were asked for. A value other than 0 stops the export.
typedef int (*Tfswitch_VisitRows)(void* context, const int64_t* keys,
                                  const float* embeddings, const float* slots,
                                  size_t num_rows);

// Threads that a caller lends for one call, besides the calling one; NULL for
// none. `schedule` has one of them call task(task_context), soon or later: it
// must be called once, even if that is after the call has returned.
typedef struct Tfswitch_Threads {
  int32_t num_threads;
  void* context;
  void (*schedule)(void* context, void (*task)(void* task_context),
                   void* task_context);
} Tfswitch_Threads;

typedef struct Tfswitch_ServerOptions {
  const char* address;  // "host:port", port 0 for any, or "unix:/path".
  uint32_t shard_index;
  uint32_t num_shards;
  int32_t num_threads;         // 0: one per core.
  uint64_t max_message_bytes;  // 0: the default, 1 GiB.
  // Below it clients may save and restore. NULL: the current folder, unless
  // that is "/"; then, as with "", they may not.
  const char* checkpoint_root;
  // Further flags of tfswitch-server that bound it, as "max_tables=100".
  const char* const* limits;
  size_t num_limits;
} Tfswitch_ServerOptions;

typedef struct Tfswitch_PushOptions {
  float learning_rate;
  // A key without a row gets one first (1) or is skipped (0).
  int32_t insert_missing;
  // What the loss was multiplied with. Gradients are divided by it. If it is
  // not 1 and the gradients hold NaN or Inf, the push is skipped, as a
  // loss-scaling optimizer skips its step. A value below 1 means 1.
  float loss_scale;
  // How often each id was shown and clicked: as many as there are gradients, or
  // NULL: once and never.
  const float* shows;
  const float* clicks;
  // Of the training; 0: not known.
  int64_t global_step;
  // With a loss scale of 1: whether gradients with NaN or Inf skip the push,
  // with a warning on stderr, too (1), or are an error (0).
  int32_t skip_non_finite;
} Tfswitch_PushOptions;

typedef struct Tfswitch_PushResult {
  int64_t updated_rows;
  int32_t skipped;  // 1 if gradients had NaN or Inf and nothing was applied.
} Tfswitch_PushResult;

// One of the reads of pull_many.
typedef struct Tfswitch_PullPart {
  Tfswitch_Table* table;
  const int64_t* keys;
  size_t num_keys;
  float* embeddings;  // num_keys x dim.
  // As for pull_unique; all NULL: as pull.
  int64_t* unique_keys;
  int32_t* inverse;
  size_t* num_unique;
} Tfswitch_PullPart;

// One of the writes of push_unique_many; the fields are its arguments.
typedef struct Tfswitch_PushPart {
  Tfswitch_Table* table;
  const int64_t* unique_keys;
  size_t num_unique;
  const int32_t* inverse;
  size_t num_keys;
  const float* gradients;
  Tfswitch_PushOptions options;
  Tfswitch_PushResult result;  // Set by the call.
} Tfswitch_PushPart;

// One of the tables of served_lookup.
typedef struct Tfswitch_ServedPart {
  const char* table;
  int32_t dim;  // What the caller takes it for.
  const int64_t* keys;
  size_t num_keys;
  float* embeddings;  // num_keys x dim.
} Tfswitch_ServedPart;

// Where a worker of replicas_* below is.
typedef struct Tfswitch_ReplicaPlace {
  uint64_t incarnation;
  int64_t clock;
  int64_t round;
} Tfswitch_ReplicaPlace;

// Staged gradients to be summed, in this order.
typedef struct Tfswitch_Round {
  int64_t number;
  double total_weight;
  size_t num_contributions;
  const int64_t* keys;    // num_contributions x (worker, incarnation, clock).
  const double* weights;  // num_contributions.
  // Of the incarnations below next_incarnation, all others are gone.
  size_t num_active;
  const int64_t* active;
  int64_t next_incarnation;
} Tfswitch_Round;

typedef struct Tfswitch_Api {
  uint32_t api_version;          // TFSWITCH_API_VERSION of the core.
  const char* (*version)(void);  // "0.1.0"
  void (*free_string)(char* string);

  // --- Clusters ---------------------------------------------------------
  // "local://" or "local://NAME": tables in this process; one cluster a name.
  // "grpc://host:port,host:port" or "grpc+unix:///path": servers in shard
  // order. Waits for every server to answer. Each open has its own close; an
  // address that is open already shares its connections.
  int (*open_cluster)(const char* address, double timeout_s,
                      Tfswitch_Cluster** cluster, char* error);
  void (*close_cluster)(Tfswitch_Cluster* cluster);
  int32_t (*cluster_num_shards)(const Tfswitch_Cluster* cluster);
  // 1 if calls wait for a network, 0 if tables are in this process.
  int32_t (*cluster_is_remote)(const Tfswitch_Cluster* cluster);
  // JSON list of tables, each {"config": {...}, "lost": "", or which server has
  // lost its part, "slot_floats": n, "num_rows": n, and the other fields of
  // TableStats}. `table` NULL or "": all.
  int (*list_tables)(Tfswitch_Cluster* cluster, const char* table, char** json,
                     char* error);
  int (*drop_table)(Tfswitch_Cluster* cluster, const char* table, char* error);
  // `request_json`: {"path", "tables": [names], none for all}, to save with
  // "keep" and "drop": [names], to restore with "save": number or 0.
  // `report_json` receives {"tables": [names], "num_rows": n, "save": number}
  // and, if newer saves could not be restored, "skipped": [why].
  int (*save)(Tfswitch_Cluster* cluster, const char* request_json,
              char** report_json, char* error);
  int (*restore)(Tfswitch_Cluster* cluster, const char* request_json,
                 char** report_json, char* error);

  // --- Tables -----------------------------------------------------------
  // Creates the table, or attaches to it if it exists with an equal config.
  // `config_json`: see TableConfigToJson. The table keeps its cluster open. One
  // of this process is dropped when all that opened it have closed it.
  int (*open_table)(Tfswitch_Cluster* cluster, const char* config_json,
                    Tfswitch_Table** table, char* error);
  void (*close_table)(Tfswitch_Table* table);
  int32_t (*table_dim)(const Tfswitch_Table* table);
  int32_t (*table_slot_floats)(const Tfswitch_Table* table);
  int32_t (*table_is_remote)(const Tfswitch_Table* table);
  int (*table_size)(Tfswitch_Table* table, int64_t* num_rows, char* error);

  // Reads num_keys x dim floats. Repeated keys are sent once where that pays.
  int (*pull)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
              int32_t insert_missing, float* embeddings,
              const Tfswitch_Threads* threads, char* error);

  // The training read: `unique_keys` (room for num_keys) receives the keys
  // without repetition in order of first appearance, `inverse` (num_keys) the
  // place of each key in it, *num_unique their number.
  int (*pull_unique)(Tfswitch_Table* table, const int64_t* keys,
                     size_t num_keys, int32_t insert_missing, float* embeddings,
                     int64_t* unique_keys, int32_t* inverse, size_t* num_unique,
                     const Tfswitch_Threads* threads, char* error);

  // Applies one step per key; repeated keys are summed first.
  int (*push)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
              const float* gradients, const Tfswitch_PushOptions* options,
              Tfswitch_PushResult* result, const Tfswitch_Threads* threads,
              char* error);

  // The way back of pull_unique: sums the num_keys x dim gradients by
  // `inverse` into num_unique rows, and applies one step to each.
  int (*push_unique)(Tfswitch_Table* table, const int64_t* unique_keys,
                     size_t num_unique, const int32_t* inverse, size_t num_keys,
                     const float* gradients,
                     const Tfswitch_PushOptions* options,
                     Tfswitch_PushResult* result,
                     const Tfswitch_Threads* threads, char* error);

  // Sets embeddings (`slots` NULL) or whole rows. Of repeated keys the last
  // one stays.
  int (*assign)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                const float* embeddings, const float* slots, char* error);
  int (*erase)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
               int64_t* erased_rows, char* error);
  int (*export_rows)(Tfswitch_Table* table, int32_t with_slots,
                     Tfswitch_VisitRows visit, void* context, char* error);

  // --- Servers in this process -------------------------------------------
  int (*start_server)(const Tfswitch_ServerOptions* options,
                      Tfswitch_Server** server, char* error);
  // The bound address; valid until delete_server.
  const char* (*server_address)(const Tfswitch_Server* server);
  // Lets running calls end for at most `grace_s`. Idempotent.
  void (*stop_server)(Tfswitch_Server* server, double grace_s);
  // Stops, with no grace, and frees.
  void (*delete_server)(Tfswitch_Server* server);

  // The table's name; valid until close_table.
  const char* (*table_name)(const Tfswitch_Table* table);

  // --- Dense tables: a model's variables as rows of a table ---------------
  // The keys of the `num_blocks` blocks of a dense table.
  void (*dense_keys)(const Tfswitch_Table* table, size_t num_blocks,
                     int64_t* keys);
  // As assign(), leaving rows alone that are there; says how many were set.
  int (*assign_missing)(Tfswitch_Table* table, const int64_t* keys,
                        size_t num_keys, const float* embeddings,
                        int64_t* assigned_rows, char* error);

  // --- Training with other workers ----------------------------------------
  // Joins a group as one of its workers. `options_json`: {"group", "worker",
  // "num_workers", "lease_s", "join_timeout_s", "wait_timeout_s",
  // "contributions_per_round", "carries_late_contributions",
  // "consistency": as in a table's config, "settings": what else all workers
  // must agree on}. A cluster has one worker at a time: what was there before
  // leaves.
  int (*join_group)(Tfswitch_Cluster* cluster, const char* options_json,
                    char* error);
  // Ends a step of `weight` samples and waits as the consistency says. What was
  // pushed to bsp tables since the last end of a step belongs to it. Says to
  // which round the next step contributes.
  int (*end_step)(Tfswitch_Cluster* cluster, double weight, int64_t* round,
                  char* error);
  int (*table_end_step)(Tfswitch_Table* table, double weight, int64_t* round,
                        char* error);
  // Waits until all workers of the group wait at this barrier; nobody waits for
  // this one elsewhere meanwhile.
  int (*wait_at_barrier)(Tfswitch_Cluster* cluster, const char* barrier,
                         double timeout_s, char* error);
  // Nobody waits for this worker any more. The next step joins again. Waits for
  // the server no longer than `timeout_s`, nor than any other call.
  int (*leave_group)(Tfswitch_Cluster* cluster, double timeout_s, char* error);
  // {"group": name, "worker": n, "clock": n, "round": n, "dropped_steps": n,
  // "waits": {"count", "total_s", "longest_s"}, "workers": {...}}
  int (*worker_report)(Tfswitch_Cluster* cluster, char** json, char* error);

  // --- Synchronous steps on variables of TensorFlow -------------------------
  // Groups of this process, by name; see ReplicaCoordinator. `wait_s` bounds
  // each wait; after DEADLINE_EXCEEDED the same call goes on waiting.
  //
  // What is seldom called, as JSON, {"call": name, ...}:
  //   begin_applying  "options": as in join_group  -> {"applier"}
  //   join            "options", "worker", "previous", "applier", "wait_s"
  //                                                -> place
  //   wait_at_barrier "worker", "incarnation", "barrier", "visit", "wait_s"
  //                                                -> place
  //   leave_together  "worker", "incarnation", "visit", "wait_s"
  //   leave           "worker", "incarnation", "applier"
  //   fail_applying   "applier", "why"
  //   stats                                        -> as in worker_report
  // A place is {"incarnation", "clock", "round"}.
  int (*replicas_call)(const char* group, const char* request_json,
                       char** response_json, char* error);
  // *has_arrived: 0 at first.
  int (*replicas_end_step)(const char* group, uint32_t worker, double weight,
                           double wait_s, Tfswitch_ReplicaPlace* place,
                           int32_t* has_arrived, char* error);
  int (*replicas_beat)(const char* group, uint32_t worker, uint64_t incarnation,
                       uint64_t applier, char* error);
  int (*replicas_next_round)(const char* group, uint64_t applier, double wait_s,
                             Tfswitch_Round** round, char* error);
  void (*free_round)(Tfswitch_Round* round);
  int (*replicas_confirm_round)(const char* group, uint64_t applier,
                                int64_t number, char* error);

  // --- Work queues of the worker's group -----------------------------------
  // Makes a queue, or finds it with equal options: {"items": [strings],
  // "epochs": n, "shuffle": b, "seed": n}.
  int (*create_work_queue)(Tfswitch_Cluster* cluster, const char* queue,
                           const char* options_json, char* error);
  // Never waits. `json` receives {"epoch", "index", "value", "offset"}, or
  // "null" if there is no item now.
  int (*take_work_item)(Tfswitch_Cluster* cluster, const char* queue,
                        char** json, char* error);
  // The step that is under way has come to `offset` of the item.
  int (*advance_work_item)(Tfswitch_Cluster* cluster, const char* queue,
                           int64_t epoch, int64_t index, int64_t offset,
                           char* error);
  int (*finish_work_item)(Tfswitch_Cluster* cluster, const char* queue,
                          int64_t epoch, int64_t index, char* error);
  // *state: what the worker knows of it, a TFSWITCH_WORK_ITEM_... value.
  int (*work_item_state)(Tfswitch_Cluster* cluster, const char* queue,
                         int64_t epoch, int64_t index, int32_t* state,
                         char* error);
  // {"epoch", "epochs", "items", "finished", "leased", "returned", "reissued"}
  int (*work_queue_stats)(Tfswitch_Cluster* cluster, const char* queue,
                          char** json, char* error);

  // --- The life of rows ---------------------------------------------------
  // When what this process does from now on happens, in days since 1970; below
  // 0: now, by the clock of the server.
  void (*set_day)(Tfswitch_Cluster* cluster, double day);
  double (*day)(const Tfswitch_Cluster* cluster);
  // Evicts rows. `rules_json`: as `eviction` in a table's config, NULL for its
  // own. `report_json` receives {"evicted_rows", "evicted_bytes", "by": {rule:
  // rows}, "evicted_candidates", "remaining_rows", "remaining_usage": {"count",
  // "show", "click"}}.
  int (*shrink)(Tfswitch_Table* table, const char* rules_json, int32_t dry_run,
                char** report_json, char* error);
  // What is counted of each key: `usage` (num_keys x 5) receives count,
  // last_seen_day, show, click and delta_score, `states` (num_keys) 0 for an
  // unknown key, 1 for one that waits for admission, 2 for one with a row.
  int (*read_usage)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                    float* usage, uint8_t* states, char* error);

  // --- Many tables in one call ----------------------------------------------
  // The reads of all parts, at most TFSWITCH_MAX_PARTS, with one message to
  // each server unless they are long. A table may come more than once.
  int (*pull_many)(const Tfswitch_PullPart* parts, size_t num_parts,
                   int32_t insert_missing, const Tfswitch_Threads* threads,
                   char* error);
  // The pushes of all parts, likewise. If one must be skipped because scaling
  // overflowed, so are all. Shapes, numbers and rates are checked first: if one
  // is wrong none has been applied. After an error of a server (a table that is
  // not there, no memory, no answer) others may have been; it names the table.
  int (*push_unique_many)(Tfswitch_PushPart* parts, size_t num_parts,
                          const Tfswitch_Threads* threads, char* error);

  // --- Exports, and what serves them ---------------------------------------
  // Writes a base or a delta of tables to a folder of this machine.
  // `options_json`: {"path", "delta": b, "base_if_broken": b, "tables":
  // [names] or "all", "row_format": "float32", "float16" or "int8", "rule":
  // {"base_threshold", "delta_threshold", "delta_keep_days"} or "all",
  // "keep_bases": n}. The format and rule of a base that says none are those of
  // the export before it; a delta cannot follow one that differs from what is
  // said. "all" tables are those of the cluster and of the export before. The
  // day is the cluster's. `report_json` receives
  // {"kind": "base" or "delta", "number", "published", "num_rows",
  // "num_removed", "bytes", "why_base"}; the last is not empty if a base came
  // in place of a delta that could not follow.
  int (*publish_export)(Tfswitch_Cluster* cluster, const char* options_json,
                        char** report_json, char* error);

  // Opens the rows of an exported model by the file among its assets. If they
  // are on servers it waits for those.
  int (*open_served_model)(const char* model_file, Tfswitch_ServedModel** model,
                           char* error);
  void (*close_served_model)(Tfswitch_ServedModel* model);
  // Whether served_lookup waits for servers.
  int32_t (*served_model_is_remote)(const Tfswitch_ServedModel* model);
  // The rows that are served now. They do not change, unless they are on
  // servers, and live until they are unpinned. NULL: no memory.
  Tfswitch_ServedRows* (*pin_served_rows)(Tfswitch_ServedModel* model);
  void (*unpin_served_rows)(Tfswitch_ServedRows* rows);
  // Reads the rows of all parts; from servers with one message to each, unless
  // they are long. A table may come more than once.
  int (*served_lookup)(const Tfswitch_ServedRows* rows,
                       const Tfswitch_ServedPart* parts, size_t num_parts,
                       const Tfswitch_Threads* threads, char* error);
  // Steers a model that is open in this process. `path` is that of its model
  // file or SavedModel. {"call": name, ...}:
  //   state      -> {"number", "base_number", "created_ms", "served_since_ms",
  //                  "held", "refused", "error", "mode", "addresses",
  //                  "cached_rows", "cache_hits", "cache_misses"}
  //   refresh    looks for newer exports                       -> as state
  //   watch      "seconds": looks for them so often, 0: never  -> as state
  //   roll_back  "number": serves as of this export            -> as state
  //   resume     serves the newest again                       -> as state
  // All but state need files: FAILED_PRECONDITION if the rows are on servers.
  int (*served_model_call)(const char* path, const char* request_json,
                           char** response_json, char* error);

  // --- Lost tables ------------------------------------------------------
  // What follows when a restarted server has lost its part of a table: 0: calls
  // fail with DATA_LOSS; 1: they go on with empty rows there, which is said on
  // stderr. Holds for all who have this cluster open.
  void (*set_recreates_lost_tables)(Tfswitch_Cluster* cluster,
                                    int32_t recreates);
  // Goes on with all tables that have lost rows. `json` receives a list of
  // {"table", "shards": [those that had lost it], "num_lost_rows": n or null}.
  int (*reset_lost_tables)(Tfswitch_Cluster* cluster, char** json, char* error);
  // Sets the function that calls ask now and then while they wait, on their own
  // thread: nonzero ends the call, with the code of Cancelled. NULL: none.
  void (*set_interrupt_check)(int (*check)(void));
} Tfswitch_Api;

// The core's functions, or NULL if it does not speak `api_version`.
#if defined(TFSWITCH_BUILDING_CORE)
__attribute__((visibility("default")))
#endif
const Tfswitch_Api*
Tfswitch_GetApi(uint32_t api_version);

typedef const Tfswitch_Api* (*Tfswitch_GetApiFn)(uint32_t api_version);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TFSWITCH_CC_CAPI_TFSWITCH_H_
