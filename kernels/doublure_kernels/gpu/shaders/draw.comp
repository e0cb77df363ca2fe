#version 450
#extension GL_GOOGLE_include_directive : require
#include "glsl.h"
#include "raster.h"

void main() { draw_main(LANE, gl_WorkGroupID.xy, gl_WorkGroupID.z); }
