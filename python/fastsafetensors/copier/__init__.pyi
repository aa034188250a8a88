from fastsafetensors.v05.copier import *
