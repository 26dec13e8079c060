#!/bin/bash
# A task of a job whose launcher sets TF_CONFIG in each of its containers or steps:
#
#   task.sh PROGRAM.py [ARGUMENT...]
#
# A task of type ps is a parameter server; all others run the program. A server that is
# killed, or crashes, is started again with its rows, at most three times. One that ends
# by itself has an error that would come again, and ends the task. SIGTERM to the whole
# task, as Slurm and YARN send it, has a server save its rows and end.
#
# TFSWITCH_SECRETS  a folder with ca.pem, server.pem and server.key, for the name
#                   tfswitch, and tokens; tasks that are no servers need ca.pem and token
# TFSWITCH_DATA     a folder for the rows of servers. Default: tfswitch_data, here
# TFSWITCH_FLAGS    more flags of `tfswitch serve`
set -euo pipefail

secrets="${TFSWITCH_SECRETS:?is the folder of certificates and tokens, and is not set}"
read -r type index < <(python3 -c '
import json, os
task = json.loads(os.environ["TF_CONFIG"])["task"]
print(task["type"], task["index"])')

if [[ $type != ps ]]; then
  export TFSWITCH_TLS_CA="$secrets/ca.pem" TFSWITCH_TLS_SERVER_NAME=tfswitch
  export TFSWITCH_TOKEN_FILE="$secrets/token"
  exec python3 "$@"
fi

data="${TFSWITCH_DATA:-$PWD/tfswitch_data}/$index"
mkdir -p "$data"
read -ra flags <<<"${TFSWITCH_FLAGS:-}"
# The server gets the signal, too, and a second one would kill it in its save.
is_stopped=""
trap 'is_stopped=1' TERM

for ((restarts = 0; ; ++restarts)); do
  code=0
  tfswitch serve --data_dir="$data" --push_log --tls_cert="$secrets/server.pem" \
    --tls_key="$secrets/server.key" --token_file="$secrets/tokens" "${flags[@]}" ||
    code=$?
  [[ -z $is_stopped ]] && ((code > 128 && restarts < 3)) || exit "$code"
  echo "task.sh: server $index ended with exit code $code, and is started again" >&2
done
