#!/usr/bin/env bash
# A sweep without SLURM and under a real SLURM of one node, where one job is pre-empted; the runs are
# in plain/ and swept/. Ends with 77 where it cannot be tried. What it installs stays.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python}")
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

cannot() { echo "slurm_smoke: $1" >&2; exit 77; }
fail() { echo "slurm_smoke: $1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || cannot "needs root, to install and to start SLURM"
command -v apt-get >/dev/null || cannot "needs Debian's packages"
"$python" -c 'import hydra_plugins.hydra_submitit_launcher' 2>/dev/null ||
  cannot "needs pip install 'gradsurg[launchers]'"

place=$(mktemp -d "${TMPDIR:-/tmp}/slurm_smoke.XXXXXX")
chmod 755 "$place"
stop() {
  code=$?
  trap - EXIT
  {
    timeout 5 scancel --signal=KILL --full --user=root
    sleep 1
    kill $(jobs -p)
    wait
  } >/dev/null 2>&1 || true
  [ "$code" != 1 ] || tail -n 5 "$place"/*.log >&2
  rm -rf "$place"
  exit "$code"
}
trap stop EXIT
trap 'exit 130' INT TERM

until_() { # until_ SECONDS SENTENCE COMMAND...: wait until the command ends well, else fail
  local tries=$(($1 * 10)) sentence=$2
  shift 2
  for ((; tries; tries--)); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
  fail "$sentence"
}

if ! command -v slurmctld slurmd munged >"$place/apt.log"; then
  { apt-get update && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends slurm-wlm munge; } >"$place/apt.log" 2>&1 ||
    fail "apt-get could not install slurm-wlm and munge"
fi

# --- one node on the loopback, everything of it in $place; Ctrl-C leaves the daemons to `stop`
read -r control_port node_port < <("$python" -c '
import socket
found = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(server.getsockname()[1] for server in found))')
host=$(hostname -s)
mkdir -m 755 "$place/munge" "$place/state" "$place/spool"
head -c 128 /dev/urandom >"$place/munge/key"
chmod 600 "$place/munge/key"
chown -R munge: "$place/munge"
export SLURM_CONF="$place/slurm.conf"
cat >"$SLURM_CONF" <<CONF
ClusterName=smoke
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control_port
SlurmdPort=$node_port
SlurmUser=root
# a requeued job waits for as long as its credential is good
AuthInfo=socket=$place/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# three jobs at once, however many cores there are
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=3 State=UNKNOWN
PartitionName=smoke Nodes=ALL Default=YES State=UP
CONF

setsid setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --num-threads=2 \
  --key-file="$place/munge/key" --socket="$place/munge/socket" --pid-file="$place/munge/pid" \
  --seed-file="$place/munge/seed" --log-file="$place/munge/log" >"$place/munged.log" 2>&1 &
until_ 30 "munged did not start" munge --no-input --socket="$place/munge/socket"
setsid slurmctld -D >"$place/slurmctld.log" 2>&1 &
until_ 30 "slurmctld did not start" scontrol ping
setsid slurmd -D >"$place/slurmd.log" 2>&1 &
idle() { [ "$(sinfo --noheader --format=%T)" = idle ]; }
until_ 30 "the node did not come up" idle

# --- the same sweep undisturbed and as a job array
words=('transform=clip,[add_noise,clip],sign' model.dropout=0.2 seeds=1 steps=3000
  effects_every=2 log_every=50 checkpoint_every=200 study=smoke logger=none)
"$python" -m gradsurg.run -m "${words[@]}" out=plain >"$place/plain.log" 2>&1 ||
  fail "the sweep failed without SLURM"
"$python" -m gradsurg.run -m "${words[@]}" out=swept \
  hydra/launcher=submitit_slurm hydra.launcher.cpus_per_task=1 >"$place/swept.log" 2>&1 &
sweep=$!

under_way() { compgen -G 'swept/smoke/add_noise+clip-*/checkpoint.pt'; }
until_ 180 "the job that is to be pre-empted saved no checkpoint" under_way
array=$(squeue --noheader --array --format=%F | head -n 1)
scancel --signal=USR2 "${array}_1" || fail "the job could not be told to go"
! compgen -G 'swept/smoke/add_noise+clip-*/summary.json' >/dev/null ||
  fail "the job had ended before it was pre-empted"

wait "$sweep" || fail "the sweep ended with code $?"
scontrol show job "${array}_1" | grep -q ' Restarts=1 ' || fail "the job was not requeued once"
[ "$(scontrol --oneliner show job "$array" | grep -c 'JobState=COMPLETED')" = 3 ] ||
  fail "not all three jobs of the array were completed"
grep -qr 'add_noise.*clip, seed 0: .*resumed from its checkpoint' swept/smoke/.sweep ||
  fail "the requeued job did not go on from a checkpoint"
