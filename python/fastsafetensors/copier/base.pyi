from fastsafetensors.v05.copier.base import *
