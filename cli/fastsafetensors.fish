# SPDX-License-Identifier: Apache-2.0
# fish completion: `fastsafetensors __complete` prints the candidates, and ":files" for file names.

function __fastsafetensors_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in ($words[1] __complete $words[2..-1] 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c fastsafetensors -f -a '(__fastsafetensors_complete)'
