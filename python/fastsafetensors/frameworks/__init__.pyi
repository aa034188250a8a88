from fastsafetensors.v05.frameworks import *
