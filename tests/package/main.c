#include <ingot/ingot.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  char* machine = NULL;
  if (ingot_abi_version() != INGOT_ABI_VERSION) {
    fprintf(stderr, "header is ABI %d, library is %d\n", INGOT_ABI_VERSION, ingot_abi_version());
    return 1;
  }
  if (ingot_doctor(&machine) != INGOT_OK || machine == NULL || machine[0] != '{') {
    fprintf(stderr, "ingot_doctor failed: %s\n", ingot_last_error());
    return 1;
  }
  ingot_free(machine);
  ingot_program* program = NULL;
  if (ingot_program_create("not a graph", "{}", &program) != INGOT_INVALID_ARGUMENT ||
      program != NULL || strlen(ingot_last_error()) == 0) {
    fprintf(stderr, "a bad graph must be refused with a message\n");
    return 1;
  }
  printf("ingot %s: ABI %d, as C\n", ingot_version(), ingot_abi_version());
  return 0;
}
