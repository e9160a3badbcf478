# bash completion for cpulaunch. Written by scripts/generate-manuals. No other program is started for it.

_cpulaunch_words() {
    local IFS=$' \t\n'
    COMPREPLY+=($(compgen -W "$1" -- "$cur"))
}

_cpulaunch_files() { # the pattern of the files' names; directories are offered too
    local file
    compopt -o filenames 2>/dev/null
    while IFS= read -r file; do # not by $(...), which takes a name with "*" for a pattern
        COMPREPLY+=("$file")
    done < <(
        compgen -d -- "$cur"
        compgen -f -X "!$1" -- "$cur"
    )
}

_cpulaunch_profiles() { # further words; names may be in a list with commas
    local IFS=$' \t\n' name list=
    [[ $cur == *,* ]] && list=${cur%,*},
    for name in "${XDG_CONFIG_HOME:-$HOME/.config}"/cpulaunch/profiles/*.toml ampere container epyc-zen2 epyc-zen3 epyc-zen4 epyc-zen5 gpu-node grace graviton2 graviton3 graviton4 hybrid-desktop latency throughput training xeon-amx xeon-icelake xeon-skylake $1; do
        name=${name##*/}
        name=${name%.toml} # compgen -W would run a name such as "$(command)"
        [[ $name != '*' && $name == "${cur##*,}"* ]] || continue
        [[ ! $list ]] || printf -v name %q "$name" # readline quotes the others, as names of files
        COMPREPLY+=("$list$name")
    done
    [[ $list ]] || _cpulaunch_files '*.toml'
}

_cpulaunch_takes_value() {
    case $1 in
        -O | --optimize | --instances | --cores-per-instance | --cpus | --numa-nodes | --reserve | --strategy | --instance-index | --threads | --membind | --binder | --openmp | --affinity | --wait-policy | --allocator | --mkl-dispatch | --graph | --graph-signatures | --compile-mode | --precision | --graph-budget | --weights | --interop-threads | --ddp-bucket-mb | --dataloader-workers | --prefetch | --nproc-per-node | --nnodes | --node-rank | --master-addr | --master-port | --rdzv-backend | --rdzv-endpoint | --rdzv-id | --rdzv-conf | --local-addr | --max-restarts | --monitor-interval | --role | -r | --redirects | -t | --tee | --log-line-prefix-template | --local-ranks-filter | --duplicate-stdout-filters | --duplicate-stderr-filters | --numa-binding | --device | --signals-to-handle | --shutdown-timeout | --start-method | --event-log-handler | --logs-specs | --scheduler | --dist-backend | --ccl-workers | --ccl-path | --profile | --env | --python | --grace | --log-dir | --show | --stdin | --report | --html | --metric | --emit | --sysroot | --until | --rounds | --budget | --svg | --png | --minutes | --trials | --vary | --fix | --max-error | --output | --rate | --timeout | --save | --steps | --warm-up | --trace | --compare | --format | --select | --ignore | --explain | --ninstances | --num-instances | --ncores-per-instance | --ncore-per-instance | --nodes-list | --node-id | --cores-list | --core-list | --instance-idx | --rank | --memory-allocator | --omp-runtime | --multi-task-manager | --log-path | --log-file-prefix | --nprocs-per-node | --ccl-worker-count | --extra-mpi-params | --dtype | --hostfile) return 0 ;;
    esac
    return 1
}

_cpulaunch_value() { # what follows this option
    case $1 in
        -O | --optimize) _cpulaunch_words "0 1 2 3 4" ;;
        --instances) _cpulaunch_words "auto" ;;
        --strategy) _cpulaunch_words "spread compact" ;;
        --membind) _cpulaunch_words "preferred bind interleave none" ;;
        --binder) _cpulaunch_words "native numactl taskset none" ;;
        --openmp) _cpulaunch_words "auto default intel llvm" ;;
        --affinity) _cpulaunch_words "mask close spread explicit none" ;;
        --wait-policy) _cpulaunch_words "auto active passive" ;;
        --allocator) _cpulaunch_words "auto default tcmalloc jemalloc mimalloc" ;;
        --mkl-dispatch) _cpulaunch_words "auto on off" ;;
        --graph) _cpulaunch_words "off onednn inductor zentorch" ;;
        --compile-mode) _cpulaunch_words "default reduce-overhead max-autotune max-autotune-no-cudagraphs" ;;
        --precision) _cpulaunch_words "fp32 tf32 medium bf16 fp16" ;;
        --weights) _cpulaunch_words "fp32 bf16 int8 int4" ;;
        --dataloader-workers) _cpulaunch_words "auto" ;;
        --nproc-per-node) _cpulaunch_words "auto cpu gpu xpu numa socket l3" ;;
        --numa-binding) _cpulaunch_words "node socket exclusive core-complex" ;;
        --device) _cpulaunch_words "auto cpu gpu" ;;
        --start-method) _cpulaunch_words "spawn fork forkserver" ;;
        --scheduler) _cpulaunch_words "auto none slurm mpi pbs" ;;
        --dist-backend) _cpulaunch_words "auto gloo ccl mpi" ;;
        --ccl-path) _cpulaunch_words "auto memory oneccl" ;;
        --profile) _cpulaunch_profiles "auto none" ;;
        --python) _cpulaunch_files '*' ;;
        --log-dir) _cpulaunch_files '' ;;
        --show) _cpulaunch_words "none" ;;
        --stdin) _cpulaunch_words "all none" ;;
        --report) _cpulaunch_files '*' ;;
        --html) _cpulaunch_files '*' ;;
        --emit) _cpulaunch_words "sh slurm k8s" ;;
        --sysroot) _cpulaunch_files '' ;;
        --svg) _cpulaunch_files '*' ;;
        --png) _cpulaunch_files '*' ;;
        --output) _cpulaunch_files '*' ;;
        --trace) _cpulaunch_files '*' ;;
        --compare) _cpulaunch_files '*' ;;
        --format) _cpulaunch_words "text json sarif github" ;;
        -h | --help) _cpulaunch_help ;;
    esac
}

_cpulaunch_help() {
    _cpulaunch_words "all level placement memory preloads torch loading distributed collectives environment output program run torchrun plan compare tune diagnose probe calibrate profiles doctor check translate ipexrun run_cpu completion"
}

_cpulaunch_options() {
    case $1 in
        "" | run | torchrun | plan)
            echo "--optimize --instances --cores-per-instance --cpus --numa-nodes --smt --e-cores --reserve --strategy --instance-index --oversubscribe --threads --membind --binder --openmp --affinity --wait-policy --allocator --huge-pages --mkl-dispatch --graph --graph-signatures --compile-mode --precision --graph-budget --weights --release-weights --channels-last --inference-mode --no-debug-apis --flush-denormal --interop-threads --cudnn-benchmark --mmap-weights --fused-optimizers --ddp-bucket-mb --ipex --dataloader-workers --pin-memory --prefetch --persistent-workers --nproc-per-node --nnodes --node-rank --master-addr --master-port --standalone --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --local-addr --max-restarts --monitor-interval --role --run-path --redirects --tee --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --numa-binding --device --virtual-local-rank --signals-to-handle --shutdown-timeout --start-method --event-log-handler --logs-specs --scheduler --dist-backend --ccl-workers --ccl-worker-siblings --ccl-path --profile --env --python --grace --strict --quiet --log-dir --show --stdin --buffered --report --html --metric --start-barrier --emit --sysroot --module --no-python --from-mpi --dry-run --json --brief --verbose --show-env --help --version"
            [[ $cur != --no* ]] || echo "--no-smt --no-e-cores --no-oversubscribe --no-huge-pages --no-release-weights --no-channels-last --no-inference-mode --debug-apis --no-flush-denormal --no-cudnn-benchmark --no-mmap-weights --no-fused-optimizers --no-ipex --no-pin-memory --no-persistent-workers --no-standalone --no-run-path --no-virtual-local-rank --no-ccl-worker-siblings --no-strict --no-quiet --no-buffered --no-start-barrier"
            ;;
        "compare")
            echo "--metric --wall-time --lower-is-better --higher-is-better --until --rounds --budget --fail-if-slower --json --html --svg --png --help"
            ;;
        "tune")
            echo "--minutes --trials --fresh --vary --fix --max-error --output --metric --wall-time --lower-is-better --higher-is-better --throughput --dist --latency --rate --timeout --save --json --html --svg --png --help"
            ;;
        "diagnose")
            echo "--steps --warm-up --budget --trace --html --compare --to-end --defaults --json --help"
            ;;
        "probe")
            echo "--json --sysroot --svg --help"
            ;;
        "calibrate")
            echo "--json --python --help"
            ;;
        "profiles")
            echo "--help"
            ;;
        "profiles list")
            echo "--json --sysroot --help"
            ;;
        "profiles show")
            echo "--json --help"
            ;;
        "profiles validate")
            echo "--json --help"
            ;;
        "doctor")
            echo "--json --sysroot --python --help"
            ;;
        "check")
            echo "--json --format --fix --unsafe-fixes --select --ignore --explain --help"
            ;;
        "translate")
            echo "--help"
            ;;
        "ipexrun")
            echo "--ninstances --multi-instance --num-instances --ncores-per-instance --ncore-per-instance --nodes-list --node-id --cores-list --core-list --instance-idx --rank --use-logical-cores --use-logical-core --use-e-cores --latency-mode --throughput-mode --bind-numa-node --skip-cross-node-cores --memory-allocator --enable-tcmalloc --enable-jemalloc --use-default-allocator --benchmark --omp-runtime --disable-iomp --multi-task-manager --disable-numactl --disable-taskset --log-path --log-file-prefix --nprocs-per-node --distributed --ccl-worker-count --logical-cores-for-ccl --extra-mpi-params --auto-ipex --dtype --auto-ipex-verbose --disable-ipex-graph-mode --convert-fp64-to-fp32 --hostfile --quiet-migration --help"
            ;;
        "run_cpu")
            echo "--ninstances --multi-instance --num-instances --ncores-per-instance --ncore-per-instance --nodes-list --node-id --cores-list --core-list --instance-idx --rank --use-logical-cores --use-logical-core --use-e-cores --latency-mode --throughput-mode --bind-numa-node --skip-cross-node-cores --memory-allocator --enable-tcmalloc --enable-jemalloc --use-default-allocator --benchmark --omp-runtime --disable-iomp --multi-task-manager --disable-numactl --disable-taskset --log-path --log-file-prefix --nprocs-per-node --distributed --ccl-worker-count --logical-cores-for-ccl --extra-mpi-params --auto-ipex --dtype --auto-ipex-verbose --disable-ipex-graph-mode --convert-fp64-to-fp32 --quiet-migration --help"
            ;;
        "completion")
            echo "--help"
            ;;
    esac
}

_cpulaunch_argument() { # of a command that starts nothing
    case $1 in
        "profiles") _cpulaunch_words "list show validate" ;;
        "profiles show") _cpulaunch_profiles ;;
        "profiles validate") _cpulaunch_files '*.toml' ;;
        "completion") _cpulaunch_words "bash zsh fish" ;;
    esac
}

_cpulaunch_program() { # the name of the program
    if [[ $kind == --no-python ]]; then
        local name
        while IFS= read -r name; do # quoted, as readline does not quote what need not be a file
            printf -v name %q "$name"
            COMPREPLY+=("$name")
        done < <(compgen -c -- "$cur")
    elif [[ $kind != --module ]]; then
        [[ $command || ${COMP_WORDS[COMP_CWORD - 1]} == -- ]] || _cpulaunch_words "run torchrun plan compare tune diagnose probe calibrate profiles doctor check translate ipexrun run_cpu completion help"
        _cpulaunch_files '*.py'
    fi
}

_cpulaunch_rest() { # the arguments of the program, whose name is word $1
    if [[ $kind == --no-python ]] && declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    else
        _cpulaunch_files '*'
    fi
}

_cpulaunch() {
    local cur=${COMP_WORDS[COMP_CWORD]} command= kind= help= word at=1
    COMPREPLY=()
    while ((at < COMP_CWORD)); do
        word=${COMP_WORDS[at]}
        if [[ $word == [=:]* ]]; then # bash takes A=1 and 1:2 for three words
            ((at += 2))
        elif [[ $word == -- ]]; then
            ((at++))
            break
        elif [[ $word == -* ]]; then
            word=${word//_/-}
            if [[ ${COMP_WORDS[at + 1]} == = ]]; then
                if ((at + 2 >= COMP_CWORD)); then
                    cur=${cur#=}
                    _cpulaunch_value "$word"
                    return
                fi
                ((at += 2))
            elif _cpulaunch_takes_value "$word"; then
                ((at++))
                if ((at == COMP_CWORD)); then
                    _cpulaunch_value "$word"
                    return
                fi
            fi
            case $word in
                -h | --help) help=1 ;;
                -m | --module) kind=--module ;;
                --no-python) kind=--no-python ;;
            esac
            ((at++))
        elif [[ ! $command && " run torchrun plan compare tune diagnose probe calibrate profiles doctor check translate ipexrun run_cpu completion help " == *" $word "* ]]; then
            command=$word
            ((at++))
        elif [[ $command == profiles && " list show validate " == *" $word "* ]]; then
            command="profiles $word"
            ((at++))
        else
            break
        fi
    done
    if ((at > COMP_CWORD)); then
        return
    elif [[ $help || $command == help ]]; then
        _cpulaunch_help
    elif ((at < COMP_CWORD)); then
        case $command in
            "" | run | torchrun | plan | ipexrun | run_cpu) _cpulaunch_rest "$at" ;;
        esac
    elif [[ $cur == -* && ${COMP_WORDS[at - 1]} != -- ]]; then
        _cpulaunch_words "$(_cpulaunch_options "$command")"
    else
        case $command in
            "" | run | torchrun | plan | ipexrun | run_cpu) _cpulaunch_program ;;
            *) _cpulaunch_argument "$command" ;;
        esac
    fi
}

complete -F _cpulaunch cpulaunch
