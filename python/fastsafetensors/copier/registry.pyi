from fastsafetensors.v05.copier.registry import *
