from fastsafetensors.v05.copier.built_in import *
