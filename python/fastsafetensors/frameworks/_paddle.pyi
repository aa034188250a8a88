from fastsafetensors.v05.frameworks._paddle import *
