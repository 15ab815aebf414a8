// Cargo needs a target; abi-check reads the dependency's header only.
