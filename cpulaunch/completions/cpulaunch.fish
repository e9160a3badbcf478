# fish completion for cpulaunch. Written by scripts/generate-manuals. No other program is started for it.

function __cpulaunch_place --description 'What the cursor is at: launch, COMMAND, module, command, rest or help'
    set -l words (commandline -opc)
    set -e words[1]
    set -l place launch
    while set -q words[1]
        set -l word $words[1]
        set -e words[1]
        switch (string replace -a _ - -- $word)
            case --
                set place (string replace launch run -- $place)
            case -O --optimize --instances --cores-per-instance --cpus --numa-nodes --reserve --strategy --instance-index --threads --membind --binder --openmp --affinity --wait-policy --allocator --mkl-dispatch --graph --graph-signatures --compile-mode --precision --graph-budget --weights --interop-threads --dataloader-workers --prefetch --nproc-per-node --nnodes --node-rank --master-addr --master-port --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --local-addr --max-restarts --monitor-interval --role -r --redirects -t --tee --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --numa-binding --device --signals-to-handle --shutdown-timeout --start-method --event-log-handler --logs-specs --scheduler --dist-backend --ccl-workers --ccl-path --profile --env --python --grace --log-dir --show --stdin --report --metric --emit --sysroot --svg
                set -e words[1]
            case -h --help
                set place help
            case -m --module
                set place module
            case --no-python
                set place command
            case '-*'
            case run torchrun plan
                test $place = launch; or return (echo rest; true)
                set place $word
            case probe profiles doctor translate ipexrun run_cpu completion help
                test $place = launch; or return (echo rest; true)
                set place $word
            case list show validate
                test $place = profiles; or return (echo rest; true)
                set place "profiles $word"
            case '*'
                contains -- "$place" help 'profiles list' 'profiles show' 'profiles validate' probe profiles doctor translate ipexrun run_cpu completion help; or set place rest
                test "$place" = rest; and break
        end
    end
    echo $place
end

function __cpulaunch_at --description 'Whether the cursor is at one of these places'
    contains -- (__cpulaunch_place) $argv
end

function __cpulaunch_profiles
    printf '%s\n' ampere container epyc-zen2 epyc-zen3 epyc-zen4 epyc-zen5 gpu-node grace graviton2 graviton3 graviton4 hybrid-desktop latency throughput training xeon-amx xeon-icelake xeon-skylake
    set -l config $XDG_CONFIG_HOME ~/.config
    for file in $config[1]/cpulaunch/profiles/*.toml
        string replace -r '.*/(.*)\.toml$' '$1' -- $file
    end
end

complete -c cpulaunch -f
complete -c cpulaunch -n '__cpulaunch_at launch' -a run -d 'run a program (the default)'
complete -c cpulaunch -n '__cpulaunch_at launch' -a torchrun -d 'run a job of ranks with torchrun\'s options; one rank by default'
complete -c cpulaunch -n '__cpulaunch_at launch' -a plan -d 'print what run would do, and why; start nothing'
complete -c cpulaunch -n '__cpulaunch_at launch' -a probe -d 'show this machine: cores, caches, NUMA nodes, limits, libraries'
complete -c cpulaunch -n '__cpulaunch_at launch' -a profiles -d 'list, show or validate profiles'
complete -c cpulaunch -n '__cpulaunch_at profiles' -a list -d 'list all profiles and mark those that apply to this machine'
complete -c cpulaunch -n '__cpulaunch_at profiles' -a show -d 'show a profile'
complete -c cpulaunch -n '__cpulaunch_at profiles' -a validate -d 'check a profile file'
complete -c cpulaunch -n '__cpulaunch_at launch' -a doctor -d 'check this machine and its Python environment'
complete -c cpulaunch -n '__cpulaunch_at launch' -a translate -d 'print what another launcher\'s command line is in cpulaunch'
complete -c cpulaunch -n '__cpulaunch_at launch' -a ipexrun -d 'run a command line of ipexrun'
complete -c cpulaunch -n '__cpulaunch_at launch' -a run_cpu -d 'run a command line of run_cpu'
complete -c cpulaunch -n '__cpulaunch_at launch' -a completion -d 'print the shell completion for bash, zsh or fish'
complete -c cpulaunch -n '__cpulaunch_at launch' -a help -d 'show the help on a command or topic'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan' -k -a '(__fish_complete_suffix .py)'
complete -c cpulaunch -n '__cpulaunch_at command' -a '(__fish_complete_command)'
complete -c cpulaunch -n '__cpulaunch_at rest' -F
complete -c cpulaunch -n '__cpulaunch_at help' -a 'all level placement memory preloads torch loading distributed collectives environment output program run torchrun plan probe profiles doctor translate ipexrun run_cpu completion'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -s O -l optimize -x -a '0 1 2 3 4' -d 'how much may change for speed (also -O2)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l instances -x -a 'auto' -d 'run N independent copies of the program'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l cores-per-instance -x -d 'cores per instance'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l cpus -x -d 'use only these logical CPUs, e.g. 0-3,8'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l numa-nodes -x -d 'use only these NUMA nodes, e.g. 0,1'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l smt -d 'use SMT siblings as well'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-smt -d 'the opposite of --smt'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l e-cores -d 'use efficiency cores as well'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-e-cores -d 'the opposite of --e-cores'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l reserve -x -d 'cores per instance to keep free of compute threads'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l strategy -x -a 'spread compact' -d 'how to place instances'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l instance-index -x -d 'start only these instances of the plan, e.g. 0,2'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l oversubscribe -d 'allow more instances than cores'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-oversubscribe -d 'the opposite of --oversubscribe'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l threads -x -d 'compute threads of each worker'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l membind -x -a 'preferred bind interleave none' -d 'memory policy of each worker'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l binder -x -a 'native numactl taskset none' -d 'how to bind'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l openmp -x -a 'auto default intel llvm' -d 'OpenMP runtime to preload'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l affinity -x -a 'mask close spread explicit none' -d 'pin each OpenMP thread to CPUs of its worker'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l wait-policy -x -a 'auto active passive' -d 'what idle OpenMP threads do'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l allocator -x -a 'auto default tcmalloc jemalloc mimalloc' -d 'memory allocator to preload'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l huge-pages -d 'request transparent huge pages (allocator and torch)'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-huge-pages -d 'the opposite of --huge-pages'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l mkl-dispatch -x -a 'auto on off' -d 'let MKL use its fast kernels on AMD CPUs (same precision)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l graph -x -a 'off onednn inductor zentorch' -d 'compile modules in eval mode'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l graph-signatures -x -d 'input signatures to compile per module'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l compile-mode -x -a 'default reduce-overhead max-autotune max-autotune-no-cudagraphs' -d 'mode of torch.compile for --graph inductor'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l precision -x -a 'fp32 tf32 medium bf16 fp16' -d 'precision of products'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l graph-budget -x -d 'seconds that a worker may spend on capturing graphs'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l weights -x -a 'fp32 bf16 int8 int4' -d 'keep the weights of modules in eval mode packed in this type'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l release-weights -d 'move the original weights that --weights replaces to a file mapping'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-release-weights -d 'the opposite of --release-weights'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l channels-last -d 'store convolution weights in channels_last order'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-channels-last -d 'the opposite of --channels-last'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l inference-mode -d 'disable gradients for modules in eval mode, as under torch.no_grad'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-inference-mode -d 'the opposite of --inference-mode'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l no-debug-apis -d 'disable anomaly detection, emit_nvtx and gradcheck'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l debug-apis -d 'the opposite of --no-debug-apis'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l flush-denormal -d 'flush denormal numbers to zero'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-flush-denormal -d 'the opposite of --flush-denormal'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l interop-threads -x -d 'inter-op threads of torch'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l cudnn-benchmark -d 'let cuDNN benchmark its algorithms for each input shape (GPU)'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-cudnn-benchmark -d 'the opposite of --cudnn-benchmark'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l mmap-weights -d 'memory-map checkpoints in torch.load, so that instances share one copy'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-mmap-weights -d 'the opposite of --mmap-weights'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l fused-optimizers -d 'use fused Adam, AdamW, SGD and Adagrad unless the program chooses otherwise'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-fused-optimizers -d 'the opposite of --fused-optimizers'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l ipex -d 'apply ipex.optimize, like ipexrun --auto-ipex'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-ipex -d 'the opposite of --ipex'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l dataloader-workers -x -a 'auto' -d 'DataLoader workers, on cores of their own, if the program requests none'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l pin-memory -d 'pin the memory of DataLoader batches for copies to a GPU'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-pin-memory -d 'the opposite of --pin-memory'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l prefetch -x -d 'batches that each DataLoader worker loads ahead'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l persistent-workers -d 'keep DataLoader workers alive between epochs'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-persistent-workers -d 'the opposite of --persistent-workers'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l nproc-per-node -x -a 'auto cpu gpu xpu numa socket l3' -d 'ranks on this host'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l nnodes -x -d 'hosts of the job, or MIN:MAX for an elastic job'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l node-rank -x -d 'rank of this host (static rendezvous)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l master-addr -x -d 'host of rank 0 (static rendezvous)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l master-port -x -d 'port of rank 0\'s store'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l standalone -d 'run on one host'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-standalone -d 'the opposite of --standalone'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l rdzv-backend -x -d 'rendezvous backend for several hosts: static, c10d, etcd-v2, ...'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l rdzv-endpoint -x -d 'rendezvous address, HOST[:PORT]'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l rdzv-id -x -d 'name of the job at the rendezvous'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l rdzv-conf -x -d 'further rendezvous options, K=V,...'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l local-addr -x -d 'address at which the other hosts reach this one'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l max-restarts -x -d 'restarts of all ranks after a failure'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l monitor-interval -x -d 'seconds between checks of the ranks (several hosts)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l role -x -d 'role of the ranks, for variables and log prefixes'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l run-path -d 'run SCRIPT with runpy, like torchrun --run-path'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-run-path -d 'the opposite of --run-path'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -s r -l redirects -x -d 'write output to files'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -s t -l tee -x -d 'write output to files and to the terminal, as for --redirects'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l log-line-prefix-template -x -d 'prefix of lines that --tee shows'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l local-ranks-filter -x -d 'local ranks whose output is shown'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l duplicate-stdout-filters -x -d 'copy stdout lines that contain one of these texts to one file'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l duplicate-stderr-filters -x -d 'copy stderr lines that contain one of these texts to one file'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l numa-binding -x -a 'node socket exclusive core-complex' -d 'bind each rank to its whole NUMA node or socket, to its share of it, or to one L3'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l device -x -a 'auto cpu gpu' -d 'device the ranks compute on'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l virtual-local-rank -d 'show each rank only its own GPU, as LOCAL_RANK 0'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-virtual-local-rank -d 'the opposite of --virtual-local-rank'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l signals-to-handle -x -d 'signals that end the job'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l shutdown-timeout -x -d 'seconds between SIGTERM and SIGKILL (torchrun\'s --grace)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l start-method -x -a 'spawn fork forkserver' -d 'accepted for compatibility with torchrun'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l event-log-handler -x -d 'event handler of torch elastic'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l logs-specs -x -d 'name of a torchrun.logs_specs entry point'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l scheduler -x -a 'auto none slurm mpi pbs' -d 'read this host\'s or rank\'s place from the scheduler\'s variables'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l dist-backend -x -a 'auto gloo ccl mpi' -d 'backend of CPU collectives if the program requests gloo or none'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l ccl-workers -x -d 'oneCCL threads of each rank, on cores of their own'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l ccl-worker-siblings -d 'run oneCCL threads on SMT siblings of the rank\'s cores instead'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-ccl-worker-siblings -d 'the opposite of --ccl-worker-siblings'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l ccl-path -x -a 'auto memory oneccl' -d 'how ccl moves data'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l profile -x -k -a '(__cpulaunch_profiles; printf "%s\n" auto none; __fish_complete_suffix .toml)' -d 'profiles to use, separated by commas'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l env -x -d 'set a variable in every worker'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l python -r -F -d 'Python, or environment, that runs the program'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l grace -x -d 'seconds between SIGTERM and SIGKILL'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l strict -d 'treat warnings as errors'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-strict -d 'the opposite of --strict'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -s q -l quiet -d 'show errors, warnings and metrics only, no notes (also -q)'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-quiet -d 'the opposite of --quiet'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l log-dir -x -a '(__fish_complete_directories)' -d 'append the output of each worker to DIR/worker-N.log'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l show -x -a 'none' -d 'workers whose output is shown'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l stdin -x -a 'all none' -d 'worker that reads standard input'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l buffered -d 'let Python buffer a worker\'s output'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-buffered -d 'the opposite of --buffered'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l report -r -F -d 'write a JSON report of what took effect in each worker'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l metric -x -d 'extract a number from the output, e.g. \'samples/s: ([0-9.]+)\''
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l start-barrier -d 'hold workers at cpulaunch.ready() or their first forward until all are ready'
complete -c cpulaunch -n 'string match -q -- \'--no*\' (commandline -ct); and __cpulaunch_at launch run torchrun plan module command' -l no-start-barrier -d 'the opposite of --start-barrier'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l emit -x -a 'sh slurm k8s' -d 'print a shell script, an sbatch script or a Kubernetes manifest'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l sysroot -x -a '(__fish_complete_directories)' -d 'plan for the captured machine under DIR'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -s m -l module -d 'run SCRIPT as a module, like `python -m` (also -m)'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l no-python -d 'run SCRIPT as a command, without Python'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l from-mpi -d 'take the ranks that mpirun starts: same as --scheduler mpi'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l dry-run -d 'print the plan and start nothing, like `cpulaunch plan`'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l json -d 'print the plan as JSON and start nothing'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l brief -d 'print the plan\'s table and map only, and start nothing'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l verbose -d 'print the plan to stderr, then run it'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l show-env -d 'show the values that --env gives in plans, reports and emitted files'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at launch run torchrun plan module command' -l version -d 'show the version'
complete -c cpulaunch -n '__cpulaunch_at probe' -l json -d 'Print JSON and nothing else.'
complete -c cpulaunch -n '__cpulaunch_at probe' -l sysroot -x -a '(__fish_complete_directories)' -d 'Read the captured machine under DIR instead of this machine.'
complete -c cpulaunch -n '__cpulaunch_at probe' -l svg -r -F -d 'Write the map as an SVG file.'
complete -c cpulaunch -n '__cpulaunch_at probe' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at profiles' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at \'profiles list\'' -l json -d 'Print JSON and nothing else.'
complete -c cpulaunch -n '__cpulaunch_at \'profiles list\'' -l sysroot -x -a '(__fish_complete_directories)' -d 'Read the captured machine under DIR instead of this machine.'
complete -c cpulaunch -n '__cpulaunch_at \'profiles list\'' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at \'profiles show\'' -a '(__cpulaunch_profiles)'
complete -c cpulaunch -n '__cpulaunch_at \'profiles show\'' -l json -d 'Print JSON and nothing else.'
complete -c cpulaunch -n '__cpulaunch_at \'profiles show\'' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at \'profiles validate\'' -k -a '(__fish_complete_suffix .toml)'
complete -c cpulaunch -n '__cpulaunch_at \'profiles validate\'' -l json -d 'Print JSON and nothing else.'
complete -c cpulaunch -n '__cpulaunch_at \'profiles validate\'' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at doctor' -l json -d 'Print JSON and nothing else.'
complete -c cpulaunch -n '__cpulaunch_at doctor' -l sysroot -x -a '(__fish_complete_directories)' -d 'Read the captured machine under DIR instead of this machine.'
complete -c cpulaunch -n '__cpulaunch_at doctor' -l python -r -F -d 'Check this Python, or environment.'
complete -c cpulaunch -n '__cpulaunch_at doctor' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at translate' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at ipexrun' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at run_cpu' -s h -l help -d 'show the help'
complete -c cpulaunch -n '__cpulaunch_at completion' -a 'bash zsh fish'
complete -c cpulaunch -n '__cpulaunch_at completion' -s h -l help -d 'show the help'
