#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# say_installed.sh PREFIX [DESTDIR]: what was installed, and which lines are missing until other
# programs find it. Nothing is changed.
prefix=$1 destdir=$2
echo "installed under $destdir$prefix: bin/fastsafetensors, include/, lib/, share/"
[ -n "$destdir" ] && exit 0
# Asked for this very folder: another installation may be found before it.
found=$(pkg-config --variable=prefix fastsafetensors 2> /dev/null)
if [ "$found" != "$prefix" ]; then
    echo "for pkg-config: export PKG_CONFIG_PATH=$prefix/lib/pkgconfig\${PKG_CONFIG_PATH:+:\$PKG_CONFIG_PATH}"
    echo "for CMake:      -DCMAKE_PREFIX_PATH=$prefix"
fi
if ! ldconfig -p 2> /dev/null | grep -q "=> $prefix/lib/libfastsafetensors.so"; then
    case $prefix in
    /usr | /usr/local) echo "for programs:   ldconfig, as root" ;;
    *) echo "for programs:   link with -Wl,-rpath,$prefix/lib, or export LD_LIBRARY_PATH=$prefix/lib" ;;
    esac
fi
case :$PATH: in
*:"$prefix/bin":*) ;;
*) echo "for the shell:  export PATH=$prefix/bin:\$PATH" ;;
esac
