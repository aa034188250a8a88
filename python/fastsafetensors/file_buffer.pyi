from .v05.file_buffer import *
