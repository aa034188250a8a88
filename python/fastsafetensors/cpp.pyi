from .v05.cpp import *
