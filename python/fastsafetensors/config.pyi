from .v05.config import *
