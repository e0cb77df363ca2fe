#version 450
#extension GL_GOOGLE_include_directive : require
#include "glsl.h"
#include "raster.h"

void main() { adam_main((gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * uint(LANES) + LANE); }
