// The content hash, readable in the file: a library must be recognised before loading, because registering a namespace
// twice throws inside the loader.
#define NXD_TEXT_(x) #x
#define NXD_TEXT(x) NXD_TEXT_(x)

extern "C" __attribute__((used, visibility("default"))) const char nxd_library_identity[] =
    "NXD-NATIVE-LIBRARY:" NXD_TEXT(NXD_HASH) ":END";
