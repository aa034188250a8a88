from fastsafetensors.v05.frameworks._torch import *
